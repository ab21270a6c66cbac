#include "chorale/comm/work.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/comm/failure.h"
#include "chorale/comm/stream_wait.h"
#include "chorale/device/runtime.h"

namespace chorale::comm {

namespace {
// Refuses to wait in a child for a call that was started before the fork.
void check_own(const std::shared_ptr<Engine>& engine) {
  if (engine && engine->context().made.is_foreign()) [[unlikely]]
    raise_in_child("wait", engine->membership(), engine->context());
}
}  // namespace

void Work::synchronize(Deadline deadline) const {
  check_own(engine_);
  for (const auto& operation : operations_) comm::wait(*engine_, *operation, deadline);
}

void Work::wait(Stream& stream) const {
  check_own(engine_);
  if (is_nothing() || stream.device == kCpu) return wait();  // the CPU's stream is the calling thread
  // Ranks that are threads of one process share a device's default stream: the peer whose part is awaited would stand
  // behind the gate, too.
  if (engine_->shares_process() && stream == runtime_of(stream.device).default_stream(stream.device)) return wait();
  if (!hold_stream(*this, stream)) wait();  // as on CUDA, whose runtime cannot hold a stream
}

bool Work::is_completed() const {
  check_own(engine_);
  bool done = true;
  for (const auto& operation : operations_) done = comm::poll(*engine_, *operation) && done;
  return done;
}

Tensors Work::result() const {
  Tensors all;
  for (const auto& operation : operations_) {
    CHORALE_CHECK_STATE(!operation->pending(), "[work] the result is not there yet; wait for it first");
    if (operation->error) std::rethrow_exception(operation->error);
    for (const Tensor& tensor : operation->results) all.push_back(tensor);
  }
  return all;
}

int Work::source_rank() const {
  for (const auto& operation : operations_) {
    if (operation->kind == CallKind::kRecv && !operation->pending() && operation->source >= 0)
      return engine_->membership().members[static_cast<size_t>(operation->source)];
  }
  return -1;
}

Deadline::Clock::time_point Work::completed_at() const {
  Deadline::Clock::time_point last{};
  for (const auto& operation : operations_) last = std::max(last, operation->completed);
  return last;
}

void Work::then(std::function<void()> callback) const {
  if (operations_.empty()) return callback();
  Operation& last = *operations_.back();
  {
    const std::lock_guard lock(engine_->context().mutex);
    if (!last.told) {
      last.then.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

Future Work::future() const { return Future(*this); }

struct Future::State {
  Work work;
  std::shared_ptr<State> before;  // null for the work's own result
  std::function<Tensors(const Tensors&)> function;
  std::mutex mutex;
  bool ready = false;
  Tensors value;
  std::exception_ptr error;

  // Computes the value if that is still to be done; the work is done by now.
  void settle() {
    const std::lock_guard lock(mutex);
    if (ready) return;
    try {
      if (before) {
        before->settle();
        if (before->error) std::rethrow_exception(before->error);
        value = function(before->value);
      } else {
        value = work.result();
      }
    } catch (...) {
      error = std::current_exception();
    }
    ready = true;
  }
};

Future::Future(Work work) : state_(std::make_shared<State>()) { state_->work = std::move(work); }

Future Future::then(std::function<Tensors(const Tensors&)> function) const {
  CHORALE_CHECK(state_, "[future] the future was moved from");
  auto next = std::make_shared<State>();
  next->work = state_->work;
  next->before = state_;
  next->function = std::move(function);
  // The operation holds the callback and the callback the state, whose work holds the operation: it must not keep it.
  next->work.then([weak = std::weak_ptr<State>(next)] {
    if (const auto state = weak.lock()) state->settle();
  });
  return Future(std::move(next));
}

bool Future::is_completed() const {
  CHORALE_CHECK(state_, "[future] the future was moved from");
  return state_->work.is_completed();
}

Tensors Future::value(Deadline deadline) const {
  CHORALE_CHECK(state_, "[future] the future was moved from");
  try {
    state_->work.synchronize(deadline);
  } catch (const Error&) {
    // settle() reports it, as the error of this future.
  }
  state_->settle();
  if (state_->error) std::rethrow_exception(state_->error);
  return state_->value;
}

}  // namespace chorale::comm
