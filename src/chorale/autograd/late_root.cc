#include "chorale/autograd/late_root.h"

#include <utility>

#include "chorale/base/error.h"

namespace chorale::autograd {

void BackwardInbox::expect() {
  const std::lock_guard lock(mutex_);
  ++expected_;
}

std::vector<BackwardInbox::Delivery> BackwardInbox::take() {
  if (!news_.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(mutex_);
  news_.store(false, std::memory_order_relaxed);
  if (error_) std::rethrow_exception(error_);
  return std::exchange(deliveries_, {});
}

BackwardInbox::Wait BackwardInbox::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return news_.load(std::memory_order_relaxed) || expected_ == 0; };
  if (deadline.end() == Deadline::never().end()) {
    changed_.wait(lock, over);
  } else if (!over() && (deadline.passed() || !changed_.wait_until(lock, deadline.end(), over))) {
    // One that has passed is not handed to the system: setting its clock costs more than the look that is asked for.
    return Wait::kDeadline;
  }
  return news_.load(std::memory_order_relaxed) ? Wait::kNews : Wait::kNothingExpected;
}

void BackwardInbox::close() {
  std::vector<Delivery> dropped;  // outside the lock
  const std::lock_guard lock(mutex_);
  closed_ = true;
  dropped.swap(deliveries_);
}

void BackwardInbox::put(Delivery delivery) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    deliveries_.push_back(std::move(delivery));
    --expected_;
    news_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void BackwardInbox::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    news_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

LateRoot::LateRoot(std::shared_ptr<BackwardInbox> inbox, Edge root, uint32_t task)
    : inbox_(std::move(inbox)), root_(std::move(root)), task_(task) {
  inbox_->expect();
}

LateRoot::~LateRoot() {
  if (!inbox_) return;
  inbox_->fail(std::make_exception_ptr(
      StateError("[backward] a root that was expected was dropped; deliver, withdraw or fail it")));
}

std::shared_ptr<BackwardInbox> LateRoot::open(const char* call) {
  CHORALE_CHECK_STATE(inbox_, "[", call, "] this root was delivered, withdrawn or failed before; it comes once");
  return std::exchange(inbox_, nullptr);
}

void LateRoot::deliver(Tensors gradients) {
  CHORALE_CHECK_STATE(root_.wanted(), "[deliver] this root was not named; deliver it with its gradient");
  const size_t outputs = root_.node ? root_.node->outputs.size() : 1;
  CHORALE_CHECK(gradients.size() == outputs, "[deliver] ", gradients.size(), " gradients for a root with ", outputs,
                " outputs; those without one are undefined");
  for (size_t i = 0; i < outputs; ++i) {
    if (!gradients[i].defined()) continue;
    const TensorSpec spec = spec_of({root_.node, static_cast<uint32_t>(i), root_.leaf});
    CHORALE_CHECK(gradients[i].sizes() == spec.sizes, "[deliver] the gradient of output ", i, " of shape ", spec.sizes,
                  " has shape ", gradients[i].sizes());
  }
  open("deliver")->put({.task = task_, .gradients = std::move(gradients)});
}

void LateRoot::deliver(const Tensor& root, Tensor gradient) {
  CHORALE_CHECK_STATE(!root_.wanted(), "[deliver] this root was named; deliver its gradients alone");
  check_root(root, gradient);
  open("deliver")->put({.root = edge_of(root), .gradients = {std::move(gradient)}});
}

void LateRoot::withdraw() { open("withdraw")->put({.task = task_}); }

void LateRoot::fail(std::exception_ptr error) { open("fail")->fail(std::move(error)); }

void check_root(const Tensor& root, const Tensor& gradient) {
  CHORALE_CHECK_STATE(edge_of(root).wanted(), "[backward] a tensor of shape ", root.sizes(),
                      " does not require a gradient: nothing that leads to it does");
  CHORALE_CHECK(gradient.sizes() == root.sizes(), "[backward] the gradient of a tensor of shape ", root.sizes(),
                " has shape ", gradient.sizes());
}

TensorSpec spec_of(const Edge& edge) { return edge.node ? edge.node->outputs[edge.index] : op::spec_of(edge.leaf); }

}  // namespace chorale::autograd
