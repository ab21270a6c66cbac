#include "chorale/dist_autograd/run.h"

#include <unordered_set>

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
                   concat("[dist_autograd] a tensor came from worker ", from, " in a context that has ended"));
  Run* const run = Run::current();
  CHORALE_CHECK_STATE(run, "[backward] a tensor came from worker ", from,
                      ", and its gradient cannot go back there: call backward() of the context");
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < dout.size(); ++i) {
    const TensorSpec& spec = node.outputs[i];
    gradients.push_back(dout[i].defined() ? dout[i] : zeros(spec.sizes, spec.dtype, spec.device));
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

std::vector<const ReceiveBackward*> receives_behind(std::vector<autograd::Node*> from) {
  std::vector<const ReceiveBackward*> found;
  std::unordered_set<const autograd::Node*> seen(from.begin(), from.end());
  while (!from.empty()) {
    const autograd::Node* node = from.back();
    from.pop_back();
    if (const auto* receive = dynamic_cast<const ReceiveBackward*>(node->custom.get())) found.push_back(receive);
    for (const autograd::Edge& edge : node->edges) {
      if (edge.node && seen.insert(edge.node.get()).second) from.push_back(edge.node.get());
    }
  }
  return found;
}

Run::Run(Contexts& contexts, std::shared_ptr<ContextState> context, const RunOptions& options, Courier::Done at_end)
    : contexts_(contexts),
      context_(std::move(context)),
      options_(options),
      gradients_(context_->gradients),
      run_({.retain_graph = options.retain_graph, .sink = &gradients_}),
      must_look_(options.accounted),
      at_end_(std::move(at_end)) {}

void Run::expect_sends() {
  const Marking& marking = context_->marking;
  const bool settled = marking.run == options_.number && marking.settled;
  for (const auto& [hop, node] : context_->sends) {
    if (settled && !marking.sends.contains(hop)) continue;
    expected_.emplace(hop, run_.expect_root({node, 0, {}}));
    if (options_.accounted) starts_.push_back({hop, node});
  }
}

void Run::add_root(const Tensor& root) {
  run_.add_root(root, ones(root.sizes(), root.dtype(), root.device()));
  if (options_.accounted) starts_.push_back({0, autograd::edge_of(root).node});
}

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

void Run::withdraw(const std::vector<uint64_t>& hops) {
  const std::lock_guard lock(mutex_);
  for (const uint64_t hop : hops) {
    const auto found = expected_.find(hop);
    if (error_ || found == expected_.end()) continue;
    found->second.withdraw();
    expected_.erase(found);
    std::erase_if(starts_, [&](const Start& start) { return start.hop == hop; });
    must_look_ = options_.accounted;
  }
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
      if (ended_) continue;
    }
    struct Driven {
      Run* before;
      ~Driven() { driven = before; }
    } const scope{std::exchange(driven, this)};
    try {
      tell_absent();
      if (!graph_done_ && autograd::advance(run_)) {
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

void Run::tell_absent() {
  std::vector<autograd::Node*> from;
  std::vector<base::Intrusive<autograd::Node>> kept_alive;
  {
    const std::lock_guard lock(mutex_);
    if (!must_look_) return;
    must_look_ = false;
    looks_ = true;
    for (const Start& start : starts_) {
      from.push_back(start.node.get());
      kept_alive.push_back(start.node);
    }
  }
  std::set<uint64_t> reached;
  for (const ReceiveBackward* receive : receives_behind(std::move(from))) reached.insert(receive->hop);
  std::map<int, std::vector<uint64_t>> absent;  // by worker
  {
    const std::lock_guard lock(context_->mutex);
    for (const auto& [hop, node] : context_->receives) {
      if (!reached.contains(hop) && told_.insert(hop).second)
        absent[static_cast<const ReceiveBackward&>(*node->custom).from].push_back(hop);
    }
  }
  for (auto& [worker, hops] : absent) {
    {
      const std::lock_guard lock(mutex_);
      if (worker == options_.starter) {
        for (const uint64_t hop : hops) kept_.push_back({hop, {}});
        continue;
      }
      ++outstanding_;
    }
    send(worker, Gradients{.absent = std::move(hops)});
  }
  const std::lock_guard lock(mutex_);
  looks_ = false;
}

void Run::send_back(const ReceiveBackward& receive, std::vector<Tensor> gradients) {
  {
    const std::lock_guard lock(mutex_);
    if (receive.from == options_.starter) return kept_.push_back({receive.hop, std::move(gradients)});
    ++outstanding_;
  }
  send(receive.from, Gradients{.hop = receive.hop, .tensors = std::move(gradients)});
}

void Run::send_kept() {
  std::vector<Gradients> due;
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || is_done()) return;
    std::vector<uint64_t> absent;
    for (ReturnedGradients& each : std::exchange(kept_, {})) {
      if (each.tensors.empty()) {
        absent.push_back(each.hop);
      } else {
        due.push_back({.hop = each.hop, .tensors = std::move(each.tensors)});
      }
    }
    if (!absent.empty()) due.push_back({.absent = std::move(absent)});
    outstanding_ += static_cast<int64_t>(due.size());
  }
  for (Gradients& each : due) send(options_.starter, std::move(each));
}

void Run::send(int to, Gradients gradients) {
  gradients.context = context_->id;
  gradients.run = options_.number;
  gradients.retain_graph = options_.retain_graph;
  gradients.accounted = options_.accounted;
  contexts_.courier().send(
      to, std::move(gradients),
      [self = shared_from_this()](const std::vector<ReturnedGradients>& returned, std::exception_ptr error) {
        try {
          for (const ReturnedGradients& each : returned) {
            if (each.tensors.empty()) {
              self->withdraw({each.hop});
            } else {
              self->deliver(each.hop, each.tensors);
            }
          }
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
    context_->ended = options_.number;
    // What was differentiated and freed waits for no gradient in the next backward.
    if (!options_.retain_graph && !error) {
      for (const uint64_t hop : came) {
        if (auto node = context_->sends.extract(hop)) context_->differentiated.insert(std::move(node));
      }
    }
  }
  if (error) kept.clear();
  if (at_end) at_end(std::move(kept), error);
}

}  // namespace chorale::dist_autograd
