// A call in flight, as PyTorch knows it.
//
// Our works move when somebody waits for them (comm/work.h). PyTorch's users expect more: that a call which was started
// and forgotten ends all the same, and that futures complete by themselves. A Mover, one per group, with a
// thread that is started with the first asynchronous call, sees to that. A blocking call never meets it: its caller
// does the work.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "chorale/comm/work.h"

namespace chorale_torch {

class Work final : public c10d::Work {
 public:
  struct Parts {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* title = nullptr;  // for the profiler; lives as long as the program
    std::vector<at::Tensor> inputs, results;
    chorale::comm::Work work;
    // Sums of integers that are averages once they are divided by the number of ranks, as NCCL's are: towards zero.
    std::vector<at::Tensor> sums;
    int64_t ranks = 1;
  };
  Work(int rank, uint64_t number, Parts parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

  bool completes_within(std::chrono::microseconds time);
  // Moves it on. True when it is done; isCompleted() tells everybody.
  bool is_done() const { return work_.is_completed(); }

 private:
  // Waits, and ends the work with its result or error; does not throw.
  void settle(chorale::Deadline deadline);
  void complete_future();

  const chorale::comm::Work work_;
  const std::vector<at::Tensor> results_, sums_;
  const int64_t ranks_;
  const uint64_t number_;
  std::once_flag settled_;
  // Made when asked for, and completed once; guarded by mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
};

// The thread that started a call.
class Caller {
 public:
  Caller();
  ~Caller();
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  pid_t thread() const { return thread_; }
  // It neither computes nor is about to as soon as it gets a core.
  bool rests() const;

 private:
  const pid_t thread_;
  const int file_;
};

// Note [Which thread moves]
// A Mover polls. While the caller computes it does so seldom: there may be no core for the Mover but the caller's, and
// then it can only take away what a call is to hide behind. DistributedDataParallel rests at the end of backward until
// futures complete, which only the Mover can do; then it polls as often as it can. A thread that waits for a work
// moves it itself.
//
// What follows from a future may wait for another future. So the polling thread hands polling on to another before it
// ends works and thereby runs what follows from them; threads are started when all others are busy so.
class Mover {
 public:
  Mover() = default;
  // Gives what is still under way a few seconds.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // `core_each`: ranks do not outnumber cores.
  void add(c10::intrusive_ptr<Work> work, bool core_each);

 private:
  using Works = std::vector<c10::intrusive_ptr<Work>>;

  void run();
  Works poll(std::unique_lock<std::mutex>& lock);
  void let_another_poll();

  std::mutex mutex_;
  std::condition_variable changed_;  // there may be something to poll for a thread that does nothing
  std::condition_variable added_;    // for the thread that polls
  Works works_;
  std::shared_ptr<const Caller> caller_;  // of the last work
  bool core_each_ = true;
  bool polling_ = false;
  bool any_added_ = false;
  bool ending_ = false;
  int resting_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace chorale_torch
