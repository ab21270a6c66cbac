#include "chorale/rpc/crew.h"

#include <sched.h>

#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;

// How often a waiting thread looks for messages itself before it sleeps and leaves that to the crew.
constexpr int kLooks = 300;

void run_safely(const Crew::Task& task) {
  try {
    task();
  } catch (const std::exception& error) {
    log_warning(concat("[rpc] something that was to be done for another worker failed: ", error.what()));
  }
}

}  // namespace

Crew::Crew(Post& post, Sort sort, const CrewOptions& options) : post_(post), sort_(std::move(sort)), options_(options) {
  const std::lock_guard lock(mutex_);
  call_up();
}

void Crew::call_up() {
  if (stops_ || (has_reader_ && queue_.empty())) return;
  if (idle_ > called_) {
    ++called_;
    changed_.notify_one();
    return;
  }
  const int total = static_cast<int>(threads_.size());
  if (called_ == 0 && total - waiting_ < options_.threads && total < options_.most_threads)
    threads_.emplace_back([this] { work(); });
}

void Crew::run(Task task) {
  const std::lock_guard lock(mutex_);
  if (stops_) return;
  queue_.push_back(std::move(task));
  call_up();
}

void Crew::work() {
  Helper::set_for_this_thread(this);
  set_thread_count(1);
  std::unique_lock lock(mutex_);
  while (!stops_) {
    if (!queue_.empty()) {
      const Task task = std::move(queue_.front());
      queue_.pop_front();
      call_up();
      lock.unlock();
      run_safely(task);
      lock.lock();
    } else if (!has_reader_) {
      has_reader_ = true;
      lock.unlock();
      std::optional<Arrival> arrival = post_.take(true);
      lock.lock();
      has_reader_ = false;
      if (!arrival) continue;
      const bool ends = arrival->from < 0;
      lock.unlock();
      const Job job = sort_(std::move(*arrival));
      if (ends || (job.task && !job.is_short)) {
        const std::lock_guard again(mutex_);
        if (ends) stops_ = true;
        call_up();
      }
      if (job.task) run_safely(job.task);
      lock.lock();
    } else {
      ++idle_;
      changed_.wait(lock, [&] { return stops_ || called_ > 0; });
      --idle_;
      if (called_ > 0) --called_;
    }
  }
}

// True when something came.
bool Crew::read(bool helps_backward) {
  std::optional<Arrival> arrival = post_.take(false);
  if (!arrival) return false;
  if (Job job = sort_(std::move(*arrival)); job.task) {
    if (job.is_short || (helps_backward && job.of_backward)) {
      run_safely(job.task);
    } else {
      run(std::move(job.task));
    }
  }
  return true;
}

void Crew::wait(FutureState& state, Deadline deadline) {
  for (int look = 0; look < kLooks; ++look) {
    if (state.is_complete()) return;
    if (read(state.helps_backward())) {
      look = 0;
    } else {
      sched_yield();
    }
    if (deadline.passed()) return;
  }
  wait_long(state, deadline);
}

void Crew::wait_long(FutureState& state, Deadline deadline) {
  const bool own = is_own_thread();
  {
    const std::lock_guard lock(mutex_);
    if (own) ++waiting_;
    call_up();
  }
  while (!state.is_complete() && !deadline.passed()) {
    bool reads_somebody = true;
    {
      const std::lock_guard lock(mutex_);
      reads_somebody = stops_ || has_reader_ || called_ > 0;
      if (!reads_somebody) call_up();
    }
    if (reads_somebody) {
      // Looks up now and then: the reader may be taken for a request when there are no more threads.
      state.sleep(within(own ? 50ms : 20ms).earlier(deadline));
    } else if (!read(state.helps_backward())) {
      state.sleep(within(100us).earlier(deadline));
    }
  }
  if (own) {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }
}

void Crew::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  std::vector<std::thread> threads;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (!has_reader_) {
        threads.swap(threads_);
        break;
      }
    }
    // Again and again: another thread that reads may have taken the one before.
    post_.wake();
    std::this_thread::sleep_for(200us);
  }
  for (std::thread& thread : threads) thread.join();
}

Crew::Counts Crew::counts() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<int>(threads_.size()), idle_, waiting_, queue_.size()};
}

}  // namespace chorale::rpc
