// Ends a test that hangs, with the stacks of all its threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace chorale {

// Between start() and stop() at most `limit` may pass; otherwise the stacks of all threads go to stderr and the process
// aborts.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::milliseconds limit);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void start(std::string test);
  void stop();

 private:
  void watch();

  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string test_;                                // empty: nothing to watch
  std::chrono::steady_clock::time_point deadline_;  // of test_
  bool ending_ = false;
  std::thread thread_;  // last, so that it starts when the rest is there
};

}  // namespace chorale
