#include "chorale/testing/watchdog_test_util.h"

#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <utility>

#include "chorale/base/stacks.h"

namespace chorale {

Watchdog::Watchdog(std::chrono::milliseconds limit) : limit_(limit), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Watchdog::start(std::string test) {
  {
    const std::lock_guard lock(mutex_);
    test_ = std::move(test);
    deadline_ = std::chrono::steady_clock::now() + limit_;
  }
  changed_.notify_one();
}

void Watchdog::stop() {
  const std::lock_guard lock(mutex_);
  test_.clear();
}

void Watchdog::watch() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    if (test_.empty()) {
      changed_.wait(lock);
    } else if (std::chrono::steady_clock::now() < deadline_) {
      changed_.wait_until(lock, deadline_);
    } else {
      alarm(100);  // should printing hang as well; it takes a second, and half a minute under ThreadSanitizer
      std::cerr << "watchdog: " << test_ << " has run for " << std::chrono::duration<double>(limit_).count()
                << " s; stacks of all threads:\n"
                << stacks_of_all_threads() << std::flush;
      std::abort();
    }
  }
}

}  // namespace chorale
