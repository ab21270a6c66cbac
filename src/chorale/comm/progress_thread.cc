#include "chorale/comm/progress_thread.h"

#include <chrono>

namespace chorale::comm {

using namespace std::chrono_literals;

ProgressThread::ProgressThread(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), thread_([this] { run(); }) {}

ProgressThread::~ProgressThread() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void ProgressThread::wake() {
  {
    const std::lock_guard lock(mutex_);
    awake_ = true;
  }
  changed_.notify_one();
}

void ProgressThread::run() {
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

void ProgressThread::move_until_idle() {
  // Peers are late by microseconds, or by whole layers: then the core is left alone.
  constexpr int kYields = 2000;
  for (int rounds = 0; !ending_; ++rounds) {
    {
      const std::lock_guard lock(engine_->context().mutex);
      engine_->progress();
      if (engine_->idle()) return;
    }
    if (rounds < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(20us);
    }
  }
}

}  // namespace chorale::comm
