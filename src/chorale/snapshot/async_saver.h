// Saving in the background: the caller goes on once its values are copied.
#pragma once

#include <future>

#include "chorale/snapshot/snapshot.h"

namespace chorale::snapshot {

// Used by one thread at a time.
class AsyncSaver {
 public:
  // The saver of one process without a group.
  AsyncSaver() = default;
  // Made by all ranks together: it has a group of its own, so that saving does not get in the way of other calls.
  explicit AsyncSaver(const comm::Group& group) : group_(group.duplicate()) {}
  // Waits for the save that is under way; an error that was not asked for is logged.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // Waits for the save before this one and throws its error, without starting this one, if it failed. Then copies the
  // state into memory that is kept from save to save, and returns: what happens to the tensors afterwards does not
  // count. Options' on_step is called by another thread.
  void start(const std::filesystem::path& folder, const State& state, const SaveOptions& options = {});
  // Returns when the last save is complete; throws its error, once.
  void wait();

 private:
  comm::Group group_;
  std::vector<Tensor> staged_;
  std::future<void> saving_;
};

}  // namespace chorale::snapshot
