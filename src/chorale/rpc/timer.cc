#include "chorale/rpc/timer.h"

namespace chorale::rpc {

void Timer::at(Clock::time_point time, std::function<void()> action) {
  uint64_t key = 0;
  {
    const std::lock_guard lock(mutex_);
    key = next_key_++;
  }
  at(time, key, std::move(action));
}

void Timer::at(Clock::time_point time, uint64_t key, std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  if (stops_) return;
  actions_.emplace(std::pair(time, key), std::move(action));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (time < wakes_) changed_.notify_one();
}

void Timer::take_back(Clock::time_point time, uint64_t key) {
  std::function<void()> dropped;  // outside the lock
  const std::lock_guard lock(mutex_);
  const auto found = actions_.find({time, key});
  if (found == actions_.end()) return;
  dropped = std::move(found->second);
  actions_.erase(found);
}

void Timer::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Timer::run() {
  std::unique_lock lock(mutex_);
  while (!stops_) {
    if (actions_.empty()) {
      wakes_ = Clock::time_point::max();
      changed_.wait(lock);
      continue;
    }
    const auto first = actions_.begin();
    if (first->first.first > Clock::now()) {
      wakes_ = first->first.first;
      changed_.wait_until(lock, wakes_);
      continue;
    }
    std::function<void()> action = std::move(first->second);
    actions_.erase(first);
    wakes_ = Clock::time_point::min();
    lock.unlock();
    action();
    action = nullptr;  // before the lock: what it holds may ask for another time when it goes
    lock.lock();
  }
}

}  // namespace chorale::rpc
