#include "chorale/comm/progress_thread.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "chorale/base/forks.h"
#include "chorale/comm/core_watch.h"

namespace chorale::comm {

using namespace std::chrono_literals;

class ProgressThread::Mover {
 public:
  explicit Mover(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), thread_([this] { run(); }) {}
  ~Mover() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  void wake() {
    {
      const std::lock_guard lock(mutex_);
      awake_ = true;
    }
    changed_.notify_one();
  }

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

ProgressThread::ProgressThread(std::shared_ptr<Engine> engine)
    : mover_(base::kept_by_children(std::make_shared<Mover>(std::move(engine)))) {}

void ProgressThread::wake() { mover_->wake(); }

void ProgressThread::Mover::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return awake_ || ending_; });
    if (ending_) return;
    awake_ = false;
    lock.unlock();
    move_until_idle();
    lock.lock();
  }
}

void ProgressThread::Mover::move_until_idle() {
  // Peers are late by microseconds, or by whole layers: then the core is left alone.
  constexpr int kYields = 2000;
  for (int rounds = 0; !ending_; ++rounds) {
    {
      const std::lock_guard lock(engine_->context().mutex);
      engine_->progress();
      if (engine_->idle()) return;
    }
    if (rounds < kYields) {
      const auto before = CoreWatch::Clock::now();
      std::this_thread::yield();
      if (CoreWatch::Clock::now() - before > CoreWatch::kGap) rounds = kYields;  // somebody wants the core
    } else {
      std::this_thread::sleep_for(20us);
    }
  }
}

}  // namespace chorale::comm
