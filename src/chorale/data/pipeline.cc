#include "chorale/data/pipeline.h"

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"

namespace chorale::data {

// It is whole before the first thread starts, so that its destructor stops those that run when the system refuses
// another.
Pipeline::Pipeline(Claim claim) : claim_(std::move(claim)) {}

Pipeline::Pipeline(Claim claim, int workers, int ahead) : Pipeline(std::move(claim)) {
  CHORALE_CHECK(workers >= 0, "[Pipeline] there cannot be ", workers, " workers");
  CHORALE_CHECK(workers == 0 || ahead > 0, "[Pipeline] workers need room for at least one result, not ", ahead);
  slots_.resize(static_cast<size_t>(workers == 0 ? 1 : ahead));
  threads_.reserve(static_cast<size_t>(workers));
  for (int i = 0; i < workers; ++i) {
    threads_.emplace_back([this] {
      set_thread_count(1);
      work();
    });
  }
}

Pipeline::~Pipeline() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pipeline::work() {
  while (true) {
    size_t ticket = 0;
    Job job;
    Slot slot{.ready = true, .result = nullptr, .error = nullptr};
    {
      const std::lock_guard claiming(claiming_);
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || ended_ || claimed_ - taken_ < slots_.size(); });
        if (stopping_ || ended_) return;
        ticket = claimed_++;
      }
      try {
        job = claim_();
      } catch (...) {
        slot.error = std::current_exception();
      }
      if (!job) {
        const std::lock_guard lock(mutex_);
        ended_ = true;
      }
    }
    if (job) {
      try {
        slot.result = job();
      } catch (...) {
        slot.error = std::current_exception();
      }
    }
    const bool last = !slot.result;
    put(ticket, std::move(slot));
    if (last) return;
  }
}

void Pipeline::put(size_t ticket, Slot slot) {
  {
    const std::lock_guard lock(mutex_);
    if (!slot.result) ended_ = true;  // an error is the end for every worker
    slots_[ticket % slots_.size()] = std::move(slot);
  }
  changed_.notify_all();
}

Pipeline::Slot Pipeline::take() {
  Slot slot;
  {
    std::unique_lock lock(mutex_);
    Slot& mine = slots_[taken_ % slots_.size()];
    changed_.wait(lock, [&] { return mine.ready || (ended_ && taken_ == claimed_); });
    slot = std::exchange(mine, {});
    if (slot.ready) ++taken_;
    if (!slot.result) stopping_ = true;  // the caller will not ask for what may still be in the making
  }
  changed_.notify_all();
  return slot;
}

Pipeline::Result Pipeline::next() {
  if (threads_.empty()) {
    if (ended_) return nullptr;
    ended_ = true;  // unless this succeeds
    const Job job = claim_();
    if (!job) return nullptr;
    Result result = job();
    ended_ = false;
    return result;
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return nullptr;
  }
  const Slot slot = take();
  if (slot.error) std::rethrow_exception(slot.error);
  return slot.result;
}

}  // namespace chorale::data
