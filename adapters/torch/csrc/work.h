// A call in flight, as PyTorch knows it.
//
// Our works move when somebody waits for them (comm/work.h). PyTorch's users expect more: that a call which was started
// and forgotten ends all the same, and that futures complete by themselves. A Mover, one thread per group that is
// started with the first asynchronous call, waits for those. A blocking call never sees it: its caller does the work.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "chorale/comm/work.h"

namespace chorale_torch {

class Work final : public c10d::Work {
 public:
  struct Parts {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* title = nullptr;  // for the profiler
    std::vector<at::Tensor> inputs, results;
    chorale::comm::Work work;
    std::function<void()> after;  // once, when it has succeeded
  };
  Work(int rank, uint64_t number, Parts parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return number_; }

  // Waits, and ends the work with its result or error; does not throw.
  void move();

 private:
  void settle(std::exception_ptr error);

  const chorale::comm::Work work_;
  const std::vector<at::Tensor> results_;
  std::function<void()> after_;
  const uint64_t number_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::once_flag settled_;
};

class Mover {
 public:
  Mover() = default;
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  void add(c10::intrusive_ptr<Work> work);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<Work>> works_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace chorale_torch
