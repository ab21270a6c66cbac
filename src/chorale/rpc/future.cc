#include "chorale/rpc/future.h"

#include <algorithm>

#include "chorale/base/log.h"

namespace chorale::rpc {

constinit thread_local Helper* own_helper = nullptr;

Helper* Helper::of_this_thread() { return own_helper; }
void Helper::set_for_this_thread(Helper* helper) { own_helper = helper; }

bool FutureState::wait(Deadline deadline) {
  if (is_complete()) return true;
  Helper* const helper = helper_ ? helper_.get() : own_helper;
  if (!helper) return sleep(deadline);
  helper->wait(*this, deadline);
  return is_complete();
}

bool FutureState::sleep(Deadline deadline, uint64_t seen) {
  if (is_complete()) return true;
  const auto awake = [&] { return is_complete() || (seen != kNoNudges && nudges_ > seen); };
  std::unique_lock lock(mutex_);
  ++sleepers_;
  if (deadline.end() == Deadline::never().end()) {
    changed_.wait(lock, awake);
  } else {
    changed_.wait_until(lock, deadline.end(), awake);
  }
  --sleepers_;
  return is_complete();
}

void FutureState::nudge() {
  const std::lock_guard lock(mutex_);
  ++nudges_;
  changed_.notify_all();
}

bool FutureState::begin_reading(Helper* helper) {
  const std::lock_guard lock(mutex_);
  if (is_complete()) return false;
  readers_.push_back(helper);
  return true;
}

void FutureState::end_reading(Helper* helper) {
  const std::lock_guard lock(mutex_);
  readers_.erase(std::find(readers_.begin(), readers_.end(), helper));
}

void FutureState::add_callback(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_complete()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

bool FutureState::try_set_error(std::exception_ptr error) {
  return complete([&] { error_ = std::move(error); });
}

void FutureState::set_error(std::exception_ptr error) {
  if (!try_set_error(std::move(error))) raise_twice();
}

void FutureState::raise_twice() { throw StateError("[future] it is complete already; a future is completed once"); }

namespace detail {

void log_lost_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    log_warning(concat("[future] a callback threw, and nobody waits for it: ", known.what()));
  } catch (...) {
    log_warning("[future] a callback threw something that is no std::exception");
  }
}

}  // namespace detail
}  // namespace chorale::rpc
