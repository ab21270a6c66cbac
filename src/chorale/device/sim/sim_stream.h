// Streams of the simulated device: a thread each, which runs its tasks in order, and late.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "chorale/device/runtime.h"

namespace chorale::sim {

// Lives as long as the process: its thread is never joined.
class SimStream {
 public:
  using Task = std::function<void()>;

  // Before a task the thread sleeps at times, up to `most_delay`.
  SimStream(uint64_t seed, std::chrono::microseconds most_delay);

  void put(Task task);
  // A task throws: the tasks behind it are left out until somebody waits and gets the exception.
  std::shared_ptr<Event::State> record();
  // Tasks after this one begin when the event is done. An error before the event is this stream's, too.
  void wait(const std::shared_ptr<Event::State>& event);
  // No task begins between these two calls.
  void hold();
  void go_on();

  // Tasks that are put between these two are kept instead of run.
  void begin_recording();
  std::vector<Task> end_recording();

 private:
  class Point;
  void run();
  bool passed(uint64_t number);
  void await(uint64_t number, Deadline deadline);
  std::exception_ptr take_failure();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t put_ = 0, done_ = 0;
  bool started_ = false, held_ = false, recording_ = false;
  std::vector<Task> recorded_;
  std::exception_ptr failure_;
  std::mt19937_64 random_;
  const std::chrono::microseconds most_delay_;
};

}  // namespace chorale::sim
