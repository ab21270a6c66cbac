#include "work.h"

#include "convert.h"

namespace chorale_torch {
namespace {

std::optional<std::vector<at::Tensor>> if_any(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return std::nullopt;
  return tensors;
}

std::exception_ptr torch_error(const std::function<void()>& body) {
  try {
    translated(body);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

Work::Work(int rank, uint64_t number, Parts parts)
    : c10d::Work(rank, parts.type, parts.title, if_any(parts.inputs)),
      work_(std::move(parts.work)),
      results_(std::move(parts.results)),
      after_(std::move(parts.after)),
      number_(number),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void Work::settle(std::exception_ptr error) {
  std::call_once(settled_, [&] {
    if (!error && after_) error = torch_error(after_);
    after_ = nullptr;
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(at::IValue(results_));
    }
  });
}

void Work::move() {
  settle(torch_error([&] { work_.wait(); }));
}

bool Work::isCompleted() {
  if (!work_.is_completed()) return false;
  move();
  return true;
}

bool Work::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

int Work::sourceRank() const { return work_.source_rank(); }

bool Work::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {
    move();
  } else {
    settle(torch_error([&] { work_.synchronize(chorale::within(timeout)); }));
  }
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

// ---- the thread

void Mover::add(c10::intrusive_ptr<Work> work) {
  {
    const std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
}

void Mover::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || !works_.empty(); });
    if (works_.empty()) return;
    const auto work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work->move();
    lock.lock();
  }
}

Mover::~Mover() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

}  // namespace chorale_torch
