#include "chorale/device/sim/sim_stream.h"

#include <thread>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"

namespace chorale::sim {

// A number of tasks that must have been done.
class SimStream::Point final : public Event::State {
 public:
  Point(SimStream& stream, uint64_t number) : stream_(stream), number_(number) {}
  bool done() const override { return stream_.passed(number_); }
  void synchronize(Deadline deadline) override { stream_.await(number_, deadline); }

 private:
  SimStream& stream_;
  const uint64_t number_;
};

SimStream::SimStream(uint64_t seed, std::chrono::microseconds most_delay) : random_(seed), most_delay_(most_delay) {
  // A thread that first calls OpenMP while the process ends finds it gone, and LLVM's aborts then. So it has called it
  // when this returns.
  std::thread([this] { run(); }).detach();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return started_; });
}

void SimStream::put(Task task) {
  const std::lock_guard lock(mutex_);
  if (recording_) {
    recorded_.push_back(std::move(task));
    return;
  }
  tasks_.push_back(std::move(task));
  ++put_;
  changed_.notify_all();
}

void SimStream::run() {
  set_thread_count(1);  // kernels do not take the host's cores
  std::unique_lock lock(mutex_);
  started_ = true;
  changed_.notify_all();
  while (true) {
    changed_.wait(lock, [&] { return !tasks_.empty() && !held_; });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    const bool late = most_delay_.count() > 0 && random_() % 4 == 0;
    const std::chrono::microseconds delay(late ? random_() % static_cast<uint64_t>(most_delay_.count()) : 0);
    const bool skipped = failure_ != nullptr;
    lock.unlock();
    std::exception_ptr failure;
    if (!skipped) {
      if (late) std::this_thread::sleep_for(delay);
      try {
        task();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    task = nullptr;  // what it holds may free memory: not under the lock
    lock.lock();
    if (failure && !failure_) failure_ = std::move(failure);
    ++done_;
    changed_.notify_all();
  }
}

bool SimStream::passed(uint64_t number) {
  const std::lock_guard lock(mutex_);
  return done_ >= number;
}

std::exception_ptr SimStream::take_failure() { return std::exchange(failure_, nullptr); }

void SimStream::await(uint64_t number, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto reached = [&] { return done_ >= number; };
  if (deadline.end() == Deadline::never().end()) {
    changed_.wait(lock, reached);
  } else {
    CHORALE_CHECK_STATE(changed_.wait_until(lock, deadline.end(), reached),
                        "work on a simulated device was not done in time: ", put_ - done_, " tasks are left");
  }
  if (const std::exception_ptr failure = take_failure()) {
    lock.unlock();
    std::rethrow_exception(failure);
  }
}

std::shared_ptr<Event::State> SimStream::record() {
  const std::lock_guard lock(mutex_);
  return std::make_shared<Point>(*this, put_);
}

void SimStream::wait(const std::shared_ptr<Event::State>& event) {
  put([event] { event->synchronize(Deadline::never()); });
}

void SimStream::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}
void SimStream::go_on() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void SimStream::begin_recording() {
  const std::lock_guard lock(mutex_);
  CHORALE_CHECK_STATE(!recording_, "this stream is being recorded already");
  recording_ = true;
}
std::vector<SimStream::Task> SimStream::end_recording() {
  const std::lock_guard lock(mutex_);
  CHORALE_CHECK_STATE(recording_, "this stream is not being recorded");
  recording_ = false;
  return std::exchange(recorded_, {});
}

}  // namespace chorale::sim
