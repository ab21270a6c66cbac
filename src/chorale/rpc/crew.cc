#include "chorale/rpc/crew.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/trace/trace.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;

// How long a waiting thread looks for messages itself before it sleeps and leaves that to the crew; and an idle thread
// of the crew for something to do. Times, not counts: on a busy machine one look may take longer than all of this.
constexpr auto kLookTime = 200us, kIdleLookTime = 50us;
// Note [Watching]. Longer naps leave a message alone for longer while all threads that are awake run user code.
constexpr auto kNap = 200us;
constexpr int kQuietNaps = 10;
constexpr unsigned long kTimerSlackNs = 1000;  // of a nap; the system's 50 us would be half of it

constinit thread_local uint64_t chain_of_thread = 0;

}  // namespace

uint64_t Crew::current_chain() { return chain_of_thread; }

// The task ends here, not with the lock: what it holds may send messages when it goes.
void Crew::run_safely(Task given) {
  const Task task = std::move(given);
  struct Scope {
    uint64_t before;
    ~Scope() { chain_of_thread = before; }
  } const scope{std::exchange(chain_of_thread, task.chain)};
  try {
    task.run();
  } catch (const std::exception& error) {
    log_warning(concat("[rpc] something that was to be done for another worker failed: ", error.what()));
  }
}

Crew::Crew(Post& post, Sort sort, const CrewOptions& options)
    : post_(post), sort_(std::move(sort)), options_(options) {}

void Crew::start() {
  const std::lock_guard lock(mutex_);
  call_up();
}

bool Crew::can_grow() const {
  const int total = static_cast<int>(threads_.size());
  return total - waiting_ < options_.threads && total < options_.most_threads;
}

void Crew::call_up() {
  if (stops_ || (has_reader_ && queue_.empty())) return;
  if (idle_ > called_) {
    if (++called_ > looking_) changed_.notify_one();
  } else if (called_ == 0) {
    if (can_grow()) {
      threads_.emplace_back([this] { work(); });
    } else if (stands_aside_) {
      queue_grew_.notify_one();  // the reader takes what is queued
    } else if (own_reader_) {
      post_.wake();  // it takes what is queued
    } else {
      wake_a_waiter();
    }
  }
}

void Crew::pass_reading_on() {
  ++passed_on_;
  if (!watches_) call_up();
}

void Crew::wake_a_waiter() {
  for (const Waiter* waiter : waiters_) {
    if (waiter->does == Waiter::Does::kRuns) continue;
    const bool helps = !has_reader_ || std::any_of(queue_.begin(), queue_.end(), [&](const Task& task) {
      return waiter->chain != 0 && task.chain == waiter->chain;
    });
    if (!helps) continue;
    if (waiter->does == Waiter::Does::kReads) return post_.wake();
    return waiter->state.nudge();
  }
}

bool Crew::take_of_chain(uint64_t chain, Task& task) {
  if (chain == 0 || idle_ > called_ || can_grow()) return false;
  const auto found =
      std::find_if(queue_.begin(), queue_.end(), [&](const Task& queued) { return queued.chain == chain; });
  if (found == queue_.end()) return false;
  task = std::move(*found);
  queue_.erase(found);
  return true;
}

void Crew::run(std::function<void()> task, uint64_t chain, bool completes) {
  std::unique_lock lock(mutex_);
  if (!stops_) {
    queue_.push_back({std::move(task), chain, completes});
    return call_up();
  }
  lock.unlock();
  if (completes) run_safely({std::move(task), chain});
}

void Crew::work() {
  Helper::set_for_this_thread(this);
  set_thread_count(1);
  trace::set_rank(options_.rank);
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  std::unique_lock lock(mutex_);
  for (bool was_queued = false; !stops_;) {
    if (!queue_.empty()) {
      run_queued(lock);
      was_queued = true;
    } else if (!has_reader_) {
      read_on(lock);
      was_queued = false;
    } else {
      idle(lock, was_queued);
    }
  }
}

void Crew::run_queued(std::unique_lock<std::mutex>& lock) {
  Task task = std::move(queue_.front());
  queue_.pop_front();
  call_up();
  lock.unlock();
  run_safely(std::move(task));
  lock.lock();
}

void Crew::read_on(std::unique_lock<std::mutex>& lock) {
  has_reader_ = own_reader_ = true;
  std::optional<Arrival> arrival;
  if (stand_aside(lock)) {
    const Post::Receiving next = post_.receiving();
    lock.unlock();
    arrival = post_.take(next, Deadline::never());
    lock.lock();
  }
  has_reader_ = own_reader_ = false;
  if (!arrival) return;
  if (arrival->from < 0) stops_ = true;
  lock.unlock();
  Job job = sort_(std::move(*arrival));
  if (job.task && !job.is_short) {
    const std::lock_guard again(mutex_);
    pass_reading_on();
  }
  if (job.task) run_safely({std::move(job.task), job.chain});
  lock.lock();
}

bool Crew::stand_aside(std::unique_lock<std::mutex>& lock) {
  stands_aside_ = true;
  while (!stops_ && queue_.empty()) {
    const uint64_t looks = looks_.load(std::memory_order_relaxed);
    if (std::exchange(seen_looks_, looks) == looks) break;  // nobody else looks, or it is busy with what it found
    queue_grew_.wait_for(lock, kNap, [&] { return stops_ || !queue_.empty(); });
  }
  stands_aside_ = false;
  return !stops_ && queue_.empty();
}

void Crew::idle(std::unique_lock<std::mutex>& lock, bool looks) {
  ++idle_;
  if (looks) {
    // While tasks come one after the other, waking a thread that sleeps would cost more than most of them.
    ++looking_;
    lock.unlock();
    for (const Deadline end = within(kIdleLookTime); called_ == 0 && !end.passed();) sched_yield();
    lock.lock();
    --looking_;
  }
  if (!watches_) watch(lock);
  if (has_reader_) changed_.wait(lock, [&] { return stops_ || called_ > 0; });
  --idle_;
  if (called_ > 0) --called_;
}

void Crew::watch(std::unique_lock<std::mutex>& lock) {
  watches_ = true;
  for (int quiet = 0; has_reader_ && !stops_ && called_ == 0 && quiet < kQuietNaps; ++quiet) {
    const uint64_t seen = passed_on_;
    changed_.wait_for(lock, kNap, [&] { return stops_ || called_ > 0; });
    if (passed_on_ != seen) quiet = 0;
  }
  watches_ = false;
}

void Crew::handle(Arrival arrival, bool helps_backward) {
  if (arrival.from < 0) {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    changed_.notify_all();
  }
  Job job = sort_(std::move(arrival));
  if (!job.task) return;
  if (job.is_short || (helps_backward && job.of_backward)) {
    run_safely({std::move(job.task), job.chain});
  } else {
    run(std::move(job.task), job.chain, job.completes);
  }
}

bool Crew::read(bool helps_backward) {
  std::optional<Arrival> arrival = post_.take();
  if (!arrival) return false;
  handle(std::move(*arrival), helps_backward);
  return true;
}

void Crew::read_for(FutureState& state, const Post::Receiving& next, Deadline deadline) {
  if (!state.begin_reading(this)) return;
  std::optional<Arrival> arrival = post_.take(next, deadline);
  state.end_reading(this);
  if (arrival) handle(std::move(*arrival), state.helps_backward());
}

bool Crew::look(FutureState& state, Deadline deadline) {
  for (Deadline looks = within(kLookTime); !looks.passed();) {
    if (state.is_complete() || deadline.passed()) return true;
    looks_.fetch_add(1, std::memory_order_relaxed);
    if (read(state.helps_backward())) {
      looks = within(kLookTime);
    } else {
      sched_yield();
    }
  }
  return false;
}

void Crew::wait(FutureState& state, Deadline deadline) {
  if (!look(state, deadline)) wait_long(state, deadline);
}

void Crew::wait_long(FutureState& state, Deadline deadline) {
  const bool own = is_own_thread();
  Waiter waiter{state, own ? chain_of_thread : 0, Waiter::Does::kRuns};
  std::unique_lock lock(mutex_);
  waiters_.push_back(&waiter);
  if (own) ++waiting_;
  while (!state.is_complete() && !deadline.passed()) {
    const uint64_t seen = state.nudges();
    waiter.does = Waiter::Does::kRuns;
    call_up();  // also for what this thread has just stopped doing
    if (Task task; take_of_chain(waiter.chain, task)) {
      lock.unlock();
      run_safely(std::move(task));
      lock.lock();
    } else if (!has_reader_ && !stops_ && called_ == 0 && idle_ == 0 && !can_grow()) {
      has_reader_ = true;
      waiter.does = Waiter::Does::kReads;
      const Post::Receiving next = post_.receiving();
      lock.unlock();
      read_for(state, next, deadline);
      lock.lock();
      has_reader_ = false;
    } else {
      waiter.does = Waiter::Does::kSleeps;
      lock.unlock();
      state.sleep(deadline, seen);
      lock.lock();
    }
  }
  if (own) --waiting_;
  std::erase(waiters_, &waiter);
  // What this thread was woken for is left to another one.
  call_up();
}

void Crew::stop() {
  std::deque<Task> queued;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    queued.swap(queue_);
  }
  changed_.notify_all();
  for (Task& task : queued) {
    if (task.completes) run_safely(std::move(task));
  }
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
