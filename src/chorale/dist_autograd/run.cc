#include "chorale/dist_autograd/run.h"

#include "chorale/autograd/advance.h"
#include "chorale/base/rpc_error.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/trace/trace.h"

namespace chorale::dist_autograd {
namespace {

constinit thread_local Run* driven = nullptr;

}  // namespace

Run* Run::current() { return driven; }

Tensors ReceiveBackward::apply(autograd::Node& node, std::span<const Tensor> dout, op::InputSet) {
  const trace::Span span("dist_autograd:receive");
  const auto known = context.lock();
  if (!known || known->released)
    throw RpcError(RpcErrorKind::kDeadContext, -1,
                   "[dist_autograd] a context was released while its backward was under way");
  Run* const run = Run::current();
  CHORALE_CHECK_STATE(run, "[backward] a tensor came from worker ", from,
                      ", and its gradient cannot go back there: call backward() of the context");
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < dout.size(); ++i) {
    const TensorSpec& spec = node.outputs[i];
    gradients.push_back(dout[i].defined() ? dout[i] : zeros(spec.sizes, spec.dtype));
  }
  run->send_back(*this, std::move(gradients));
  return {};
}

void RunGradients::accept(const Tensor& leaf, Tensor gradient, autograd::Arrival arrival) {
  const bool sparse = gradient.is_sparse();
  const bool is_shared = gradient.use_count() > 1 || (!gradient.extension() && gradient.storage()->use_count() > 1);
  if (is_shared) {
    const std::lock_guard lock(mutex_);
    shared_.push_back(gradient);
  }
  if (is_shared && sparse) {
    const SparseParts& parts = gradient.sparse();
    gradient = Tensor::sparse_coo(clone(parts.indices), clone(parts.values), gradient.sizes(), parts.coalesced);
  }
  context_.accept(leaf, std::move(gradient), arrival);
}

void RunGradients::let_go() {
  std::vector<Tensor> shared;  // outside the lock
  const std::lock_guard lock(mutex_);
  shared.swap(shared_);
}

Run::Run(Contexts& contexts, std::shared_ptr<ContextState> context, uint64_t number, bool retain_graph, int starter,
         Courier::Done at_end)
    : contexts_(contexts),
      context_(std::move(context)),
      number_(number),
      retain_graph_(retain_graph),
      starter_(starter),
      gradients_(context_->gradients),
      run_({.retain_graph = retain_graph, .sink = &gradients_}),
      at_end_(std::move(at_end)) {}

void Run::expect_sends() {
  const Marking& marking = context_->marking;
  const bool settled = marking.run == number_ && marking.settled;
  for (const auto& [hop, node] : context_->sends) {
    if (!settled || marking.sends.contains(hop)) expected_.emplace(hop, run_.expect_root({node, 0, {}}));
  }
}

void Run::add_root(const Tensor& root) { run_.add_root(root, ones(root.sizes(), root.dtype())); }

void Run::deliver(uint64_t hop, const std::vector<Tensor>& gradients) {
  const std::lock_guard lock(mutex_);
  if (error_) return;  // its sender learns of that by other ways
  const auto found = expected_.find(hop);
  CHORALE_CHECK_STATE(found != expected_.end(), "[dist_autograd] gradients of hop ", hop, " came to worker ",
                      contexts_.worker(), came_.contains(hop) ? " twice" : ", which does not expect them");
  found->second.deliver(Tensors(gradients.begin(), gradients.end()));
  expected_.erase(found);
  came_.insert(hop);
}

void Run::withdraw_others(const std::set<uint64_t>& marked) {
  const std::lock_guard lock(mutex_);
  for (auto at = expected_.begin(); at != expected_.end();) {
    if (marked.contains(at->first)) {
      ++at;
      continue;
    }
    at->second.withdraw();
    at = expected_.erase(at);
  }
}

void Run::drive() {
  if (news_.fetch_add(1, std::memory_order_acq_rel) > 0) return;
  const auto self = shared_from_this();
  int64_t seen = 0;
  do {
    seen = news_.load(std::memory_order_acquire);
    {
      const std::lock_guard lock(mutex_);
      if (ended_ || graph_done_) continue;
    }
    struct Driven {
      Run* before;
      ~Driven() { driven = before; }
    } const scope{std::exchange(driven, this)};
    try {
      if (autograd::advance(run_)) {
        const std::lock_guard lock(mutex_);
        graph_done_ = true;
      }
    } catch (...) {
      fail(std::current_exception());
    }
    send_kept();
  } while (news_.fetch_sub(seen, std::memory_order_acq_rel) != seen);
  end_if_done();
}

void Run::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
  }
  end_if_done();
}

void Run::send_back(const ReceiveBackward& receive, std::vector<Tensor> gradients) {
  {
    const std::lock_guard lock(mutex_);
    if (receive.from == starter_) return kept_.push_back({receive.hop, std::move(gradients)});
    ++outstanding_;
  }
  send(receive.from, receive.hop, std::move(gradients));
}

void Run::send_kept() {
  std::vector<ReturnedGradients> kept;
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || is_done()) return;
    kept.swap(kept_);
    outstanding_ += static_cast<int64_t>(kept.size());
  }
  for (ReturnedGradients& each : kept) send(starter_, each.hop, std::move(each.tensors));
}

void Run::send(int to, uint64_t hop, std::vector<Tensor> gradients) {
  contexts_.courier().send(
      to, Gradients{context_->id, number_, hop, retain_graph_, std::move(gradients)},
      [self = shared_from_this()](const std::vector<ReturnedGradients>& returned, std::exception_ptr error) {
        try {
          for (const ReturnedGradients& each : returned) self->deliver(each.hop, each.tensors);
        } catch (const std::exception&) {
          error = std::current_exception();
        }
        {
          const std::lock_guard lock(self->mutex_);
          --self->outstanding_;
        }
        if (error) {
          self->fail(error);
        } else if (returned.empty()) {
          self->end_if_done();
        } else {
          self->drive();
        }
      });
}

void Run::end_if_done() {
  Courier::Done at_end;
  std::exception_ptr error;
  std::set<uint64_t> came;
  std::vector<ReturnedGradients> kept;
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || !is_done()) return;
    ended_ = true;
    at_end = std::move(at_end_);
    error = error_;
    came.swap(came_);
    kept.swap(kept_);
  }
  gradients_.let_go();
  {
    const std::lock_guard lock(context_->mutex);
    if (context_->run.get() == this) context_->run.reset();
    // What was differentiated and freed waits for no gradient in the next backward.
    if (!retain_graph_ && !error) {
      for (const uint64_t hop : came) {
        if (auto node = context_->sends.extract(hop)) context_->differentiated.insert(std::move(node));
      }
    }
  }
  if (error) kept.clear();
  if (at_end) at_end(std::move(kept), error);
}

}  // namespace chorale::dist_autograd
