// What the launcher prints, written by a thread of its own: a reader that is slow, or does not read at all, keeps the
// launcher neither from its ranks nor from signals.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "chorale/base/deadline.h"

namespace chorale::launch {

class Output {
 public:
  // What is kept for a slow reader; then the rank that has more to say waits.
  static constexpr size_t kMostBytes = size_t{8} << 20;

  explicit Output(int descriptor);
  // Gives up what is not written yet.
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Returns at once. The caller asks has_room() before it reads more; what it says itself is always kept.
  void write(std::string_view text);
  bool has_room() const;
  // True when everything is written, or never will be.
  bool is_drained() const;
  // Nobody reads any more.
  bool has_lost_its_reader() const;
  // Why nothing can be written any more, for another reason (a full disk); empty while all is well.
  std::string problem() const;
  // Readable when one of these may have changed; reads what is there to be read.
  int wake_up() const;
  void woken() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace chorale::launch
