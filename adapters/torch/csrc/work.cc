#include "work.h"

#include <ATen/ops/div.h>
#include <ATen/record_function.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "chorale/base/log.h"
#include "convert.h"

namespace chorale_torch {
namespace {

using namespace std::chrono_literals;

std::optional<std::vector<at::Tensor>> if_any(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return std::nullopt;
  return tensors;
}

// What PyTorch keeps for a profiler takes longer than a small call.
bool is_recorded() { return at::hasCallbacks(); }

}  // namespace

Work::Work(int rank, uint64_t number, Parts parts)
    : c10d::Work(rank, parts.type, is_recorded() ? parts.title : nullptr,
                 is_recorded() ? if_any(parts.inputs) : std::nullopt),
      work_(std::move(parts.work)),
      results_(std::move(parts.results)),
      sums_(std::move(parts.sums)),
      ranks_(parts.ranks),
      number_(number) {}

void Work::settle(chorale::Deadline deadline) {
  std::exception_ptr error;
  try {
    translated([&] { work_.synchronize(deadline); });
  } catch (...) {
    error = std::current_exception();
  }
  std::call_once(settled_, [&] {
    if (!error) {
      for (const at::Tensor& sum : sums_) sum.div_(ranks_, "trunc");
    }
    finish(error);
  });
  // The lock of what is above is not held here: what follows from a future may be Python, and waits for the
  // interpreter, which a thread may hold that is waiting above.
  complete_future();
}

void Work::complete_future() {
  {
    const std::lock_guard lock(mutex_);
    if (!future_ || !completed_ || std::exchange(future_completed_, true)) return;
  }
  if (exception_) {
    future_->setError(exception_);
  } else {
    future_->markCompleted(at::IValue(results_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  complete_future();
  return future_;
}

bool Work::isCompleted() {
  if (!work_.is_completed()) return false;
  settle(chorale::Deadline::never());
  return true;
}

bool Work::completes_within(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!is_done()) {
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return isCompleted();
}

bool Work::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

int Work::sourceRank() const {
  const int source = work_.source_rank();
  if (source < 0) return source;
  const auto& members = work_.engine()->membership().members;  // PyTorch wants the rank in the group
  return static_cast<int>(std::find(members.begin(), members.end(), source) - members.begin());
}

bool Work::wait(std::chrono::milliseconds timeout) {
  settle(timeout == kNoTimeout ? chorale::Deadline::never() : chorale::within(timeout));
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

// ---- the threads

Caller::Caller()
    : thread_(gettid()),
      file_(open(chorale::concat("/proc/self/task/", thread_, "/stat").c_str(), O_RDONLY | O_CLOEXEC)) {}

Caller::~Caller() {
  if (file_ >= 0) close(file_);
}

bool Caller::rests() const {
  char text[64];  // "123 (name) S ..."; a name has at most 15 characters
  const ssize_t bytes = pread(file_, text, sizeof(text), 0);
  if (bytes <= 0) return true;  // it has ended
  const size_t name_end = std::string_view(text, static_cast<size_t>(bytes)).rfind(')');
  return name_end + 2 < static_cast<size_t>(bytes) && text[name_end + 2] == 'S';
}

void Mover::add(c10::intrusive_ptr<Work> work, bool core_each) {
  const std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  if (!caller_ || caller_->thread() != gettid()) caller_ = std::make_shared<const Caller>();
  core_each_ = core_each;
  any_added_ = true;
  if (polling_) {
    added_.notify_one();
  } else {
    let_another_poll();
  }
}

void Mover::let_another_poll() {
  if (resting_ > 0) {
    changed_.notify_one();
  } else {
    threads_.emplace_back([this] { run(); });
  }
}

// Returns works that are done, at least one; none when the group ends.
Mover::Works Mover::poll(std::unique_lock<std::mutex>& lock) {
  constexpr std::chrono::microseconds kShortest = 20us, kLongest = 500us, kLongestForTheCaller = 100us;
  constexpr int kSpins = 200, kYields = 2000;  // polls without a pause, each a few microseconds
  constexpr auto kGap = 100us;                 // a yield takes longer only where another program wants the core
  constexpr auto kForTheRest = 5s;
  std::chrono::microseconds pause = kShortest;
  int eager = 0;
  std::optional<chorale::Deadline> end;
  while (!works_.empty()) {
    Works open = std::exchange(works_, {}), done;
    if (std::exchange(any_added_, false)) eager = 0;
    const std::shared_ptr<const Caller> caller = caller_;
    lock.unlock();
    // Each of them: a message that nobody sends must not keep what was started after it.
    std::erase_if(open, [&](auto& work) {
      if (!work->is_done()) return false;
      done.push_back(std::move(work));
      return true;
    });
    const bool caller_rests = done.empty() && caller->rests();
    lock.lock();
    works_.insert(works_.begin(), std::make_move_iterator(open.begin()), std::make_move_iterator(open.end()));
    if (!done.empty()) return done;
    if (ending_ && !end) end = chorale::within(kForTheRest);
    if (end && end->passed()) {
      chorale::log_warning(chorale::concat("[torch] a group ended with ", works_.size(), " calls under way"));
      works_.clear();
      break;
    }
    if (caller_rests && core_each_ && eager++ < kSpins + kYields) {
      pause = kShortest;
      lock.unlock();
      const auto before = chorale::Deadline::Clock::now();
      if (eager > kSpins) sched_yield();
      if (chorale::Deadline::Clock::now() - before > kGap) eager = kSpins + kYields;
      lock.lock();
    } else {
      const auto longest = caller_rests ? kLongestForTheCaller : kLongest;
      pause = added_.wait_for(lock, pause, [&] { return any_added_; }) ? kShortest : std::min(pause * 2, longest);
    }
  }
  return {};
}

void Mover::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++resting_;
    changed_.wait(lock, [&] { return !polling_ && (!works_.empty() || ending_); });
    --resting_;
    polling_ = true;
    const Works done = poll(lock);
    polling_ = false;
    if (done.empty()) {  // the end
      changed_.notify_all();
      return;
    }
    if (!works_.empty()) let_another_poll();
    lock.unlock();
    for (const auto& work : done) work->isCompleted();
    lock.lock();
  }
}

Mover::~Mover() {
  std::unique_lock lock(mutex_);
  ending_ = true;
  while (!threads_.empty()) {  // what follows from a work may start further ones
    std::vector<std::thread> threads = std::exchange(threads_, {});
    lock.unlock();
    changed_.notify_all();
    for (std::thread& thread : threads) thread.join();
    lock.lock();
  }
}

}  // namespace chorale_torch
