// Inside rpc: things to do later, one thread for all of them.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "chorale/base/deadline.h"

namespace chorale::rpc {

class Timer {
 public:
  using Clock = Deadline::Clock;
  Timer() = default;
  ~Timer() { stop(); }

  // Runs `action` then, on the timer's thread: it must be short.
  void at(Clock::time_point time, std::function<void()> action);
  // The same under a key, so that it can be taken back.
  void at(Clock::time_point time, uint64_t key, std::function<void()> action);
  void take_back(Clock::time_point time, uint64_t key);
  // What is left does not run.
  void stop();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<Clock::time_point, uint64_t>, std::function<void()>> actions_;
  Clock::time_point wakes_ = Clock::time_point::max();
  uint64_t next_key_ = uint64_t{1} << 63;
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace chorale::rpc
