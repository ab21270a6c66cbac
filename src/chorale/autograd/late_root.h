// Note [Late roots]
// Gradients of some roots of a backward may come from other ranks, while it is under way, in threads of their own. The
// run is told beforehand to expect them (BackwardRun::expect_root): what such a root leads to waits for it, and the run
// does not end before all have come. It sleeps while there is nothing else to do. It ends early when one of them fails
// or its deadline passes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "chorale/autograd/node.h"
#include "chorale/base/deadline.h"

namespace chorale::autograd {

// Links a run to the threads that bring its late roots; it lives as long as any of them. Thread-safe.
class BackwardInbox {
 public:
  static constexpr uint32_t kUnnamed = ~0u;
  struct Delivery {
    uint32_t task = kUnnamed;  // of a root that was named: its task in the run
    Edge root{};               // of the others: what it is; wanted() is false when it was withdrawn
    Tensors gradients{};       // by output; none when it was withdrawn
  };

  // ---- for the run

  void expect();
  // What came since the last call. Throws what failed.
  std::vector<Delivery> take();
  enum class Wait : uint8_t { kNews, kNothingExpected, kDeadline };
  // Sleeps until there is something to take.
  Wait wait(Deadline deadline);
  // The run is over: what comes from now on is dropped.
  void close();

  // ---- for everybody else

  void put(Delivery delivery);
  // The first one counts.
  void fail(std::exception_ptr error);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Delivery> deliveries_;
  std::exception_ptr error_;
  size_t expected_ = 0;
  bool closed_ = false;
  std::atomic<bool> news_{false};  // looked at before every node, without the lock
};

// The promise of a root. Any thread may keep it, also when the run is over; it is kept once. A promise that is dropped
// fails the run, so that no run waits forever.
class LateRoot {
 public:
  // Made by the run; `root` is not wanted() when it was not named.
  LateRoot(std::shared_ptr<BackwardInbox> inbox, Edge root, uint32_t task);
  LateRoot(LateRoot&&) noexcept = default;
  LateRoot& operator=(LateRoot&&) = delete;
  ~LateRoot();

  // The gradients of a root that was named, by output of its node, undefined for none; a leaf has one. InvalidArgument
  // when they do not fit; the promise is not kept then.
  void deliver(Tensors gradients);
  // A root that was not named, and its gradient.
  void deliver(const Tensor& root, Tensor gradient);
  // No gradient will come; the run goes on without it.
  void withdraw();
  // run() throws this, unless something failed before.
  void fail(std::exception_ptr error);

 private:
  std::shared_ptr<BackwardInbox> open(const char* call);

  std::shared_ptr<BackwardInbox> inbox_;  // null when the promise was kept
  Edge root_;
  uint32_t task_;
};

// InvalidArgument or StateError when `gradient` cannot be that of `root`.
void check_root(const Tensor& root, const Tensor& gradient);
// What the gradient that goes along an edge is like.
TensorSpec spec_of(const Edge& edge);

}  // namespace chorale::autograd
