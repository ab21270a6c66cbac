// A thread that moves a group's calls on while the rank's own thread computes. It pays where it has a core to itself;
// elsewhere it takes the core from the computing it should hide behind.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "chorale/comm/engine.h"

namespace chorale::comm {

class ProgressThread {
 public:
  explicit ProgressThread(std::shared_ptr<Engine> engine);
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // Something was started. The thread works until all of it is done, and sleeps then.
  void wake();

 private:
  void run();
  void move_until_idle();

  const std::shared_ptr<Engine> engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool awake_ = false;
  std::atomic<bool> ending_{false};
  std::thread thread_;  // last, so that it starts when the rest is there
};

}  // namespace chorale::comm
