// A call in flight, and what follows from its result.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/comm/engine.h"
#include "chorale/device/device.h"

namespace chorale::comm {

class Future;
using Operations = SmallVector<base::Intrusive<Operation>, 1>;

// A collective or message in flight. Thread-safe. It owns the storages of tensors passed to it; a plain span must
// outlive it. Dropping it does not cancel anything. Where the group has no thread of its own (Group::moves_by_itself),
// it moves in wait, in is_completed, in other calls of its rank, and in a ProgressThread where there is one.
class [[nodiscard]] Work {
 public:
  // Nothing to do: what a rank outside the group gets.
  Work() = default;
  Work(std::shared_ptr<Engine> engine, Operations operations)
      : engine_(std::move(engine)), operations_(std::move(operations)) {}

  // Returns once the result is visible to the host, at the latest at the call's own deadline. Throws CommError if a
  // peer failed or the deadline passed; the group is then broken and must be rebuilt.
  void wait() const { synchronize(Deadline::never()); }
  void synchronize(Deadline deadline) const;
  // Orders `stream` behind the result. The host waits for it on the CPU, on CUDA and for a shared stream (work.cc).
  void wait(Stream& stream) const;
  // Moves it on. True when it is done, also when it failed.
  bool is_completed() const;
  // The tensors that hold the result, once it is there.
  Tensors result() const;
  // The global rank that a received message came from; -1 before it came, and for other works.
  int source_rank() const;
  // When it was done; known only of works that were started while events are traced.
  Deadline::Clock::time_point completed_at() const;
  // What follows from the result.
  Future future() const;
  // Calls `callback` once, when the work is done or has failed; at once if it already is. Callbacks run in the order in
  // which they were added, on a thread that waits for the work.
  void then(std::function<void()> callback) const;

  bool is_nothing() const { return operations_.empty(); }
  const Operations& operations() const { return operations_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  std::shared_ptr<Engine> engine_;
  Operations operations_;
};

// Tensors that will be there: a work's result after a chain of functions. Cheap to copy.
class Future {
 public:
  explicit Future(Work work);
  // The value of `function` applied to this one's. It runs once, after those chained before it.
  Future then(std::function<Tensors(const Tensors&)> function) const;
  bool is_completed() const;
  // Waits, and throws what the work or a function before this one threw.
  Tensors wait() const { return value(Deadline::never()); }
  Tensors value(Deadline deadline) const;

 private:
  struct State;
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace chorale::comm
