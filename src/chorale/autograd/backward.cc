#include "chorale/autograd/backward.h"

#include <algorithm>
#include <array>
#include <optional>

#include "chorale/autograd/mode.h"
#include "chorale/base/error.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/sparse.h"
#include "chorale/op/view.h"

namespace chorale::autograd {
namespace {

constinit thread_local BackwardRun* current_run = nullptr;

// True when nobody else can see this tensor's bytes, so that it may be overwritten or kept.
bool exclusive(const Tensor& x) {
  return x.use_count() == 1 && !x.is_sparse() && x.storage()->use_count() == 1 && !slot_of(x) && x.is_contiguous();
}

void accumulate(Tensor& sum, Tensor gradient, bool create_graph) {
  if (!sum.defined()) {
    sum = std::move(gradient);
  } else if (sum.is_sparse() || gradient.is_sparse()) {
    sum = sparse_add(sum, gradient);
  } else if (!create_graph && exclusive(sum)) {
    add_(sum, gradient);
  } else {
    sum = add(sum, gradient);
  }
}

op::Meta meta_of(const Edge& edge) {
  if (edge.node) return edge.node->outputs[edge.index];
  return {edge.leaf.sizes(), edge.leaf.dtype(), edge.leaf.device()};
}

// Accumulates into the leaf's own gradient. Two backward passes in different threads may meet at a leaf.
class GradFieldSink final : public GradSink {
 public:
  void accept(const Tensor& leaf, Tensor gradient, bool create_graph) override {
    const std::lock_guard lock(mutex_of(leaf));
    Slot& slot = slot_for_writing(leaf);
    if (slot.grad.defined()) {
      if (create_graph || slot.grad.is_sparse()) {
        Tensor sum = slot.grad;
        accumulate(sum, std::move(gradient), create_graph);
        slot.grad = std::move(sum);
      } else if (gradient.is_sparse()) {
        sparse_add_(slot.grad, gradient);
      } else {
        add_(slot.grad, gradient);
      }
    } else if (slot.extras && slot.extras->destination.defined() && !create_graph) {
      if (!gradient.is(slot.extras->destination)) copy_(slot.extras->destination, to_dense(gradient));
      slot.grad = slot.extras->destination;
    } else if (create_graph || gradient.is_sparse() || exclusive(gradient)) {
      slot.grad = std::move(gradient);
    } else {
      slot.grad = clone(gradient);
    }
  }
  Tensor destination(const Tensor& leaf) override {
    const std::lock_guard lock(mutex_of(leaf));
    const Slot* slot = slot_of(leaf);
    return slot && slot->extras && !slot->grad.defined() ? slot->extras->destination : Tensor{};
  }

 private:
  std::mutex& mutex_of(const Tensor& leaf) {
    return mutexes_[reinterpret_cast<uintptr_t>(leaf.impl()) / 64 % mutexes_.size()];
  }
  std::array<std::mutex, 64> mutexes_;
};

void check_finite(const Node& node, std::span<const Tensor> din) {
  for (size_t i = 0; i < din.size(); ++i) {
    if (!din[i].defined() || din[i].is_sparse()) continue;
    const NoGrad quiet;
    CHORALE_CHECK_STATE(!any(isnan(din[i])).item<bool>(), "[anomaly] the gradient of ", node.name(), " (call number ",
                        node.number, ") for its input ", i, " of shape ", din[i].sizes(), " has NaN");
  }
}

}  // namespace

void run_completed_hooks(const Slot& slot, const Tensor& leaf) {
  if (slot.extras) slot.extras->completed.for_each([&](const LeafHook& hook) { hook(leaf); });
}

GradSink& grad_field_sink() {
  static auto* const sink = new GradFieldSink;
  return *sink;
}

BackwardRun* BackwardRun::current() { return current_run; }

uint32_t BackwardRun::task_of(const Edge& edge) {
  const void* target = edge.node ? static_cast<const void*>(edge.node.get()) : edge.leaf.impl();
  const auto [task, fresh] = task_by_target_.insert(target, static_cast<uint32_t>(tasks_.size()));
  if (fresh) {
    Task& added = tasks_.emplace_back();
    added.node = edge.node.get();
    added.leaf = edge.node ? nullptr : edge.leaf.impl();
    added.gradients.resize(edge.node ? edge.node->outputs.size() : 1);
  }
  return task;
}

void BackwardRun::discover(uint32_t root) {
  std::vector<uint32_t> unexplored{root};
  while (!unexplored.empty()) {
    const Node* node = tasks_[unexplored.back()].node;
    unexplored.pop_back();
    if (!node) continue;
    for (const Edge& edge : node->edges) {
      if (!edge.wanted()) continue;
      const size_t known = tasks_.size();
      const uint32_t target = task_of(edge);
      ++tasks_[target].waiting;
      if (tasks_.size() > known) unexplored.push_back(target);
    }
  }
}

void BackwardRun::add_root(const Tensor& root, Tensor gradient) {
  const Edge edge = edge_of(root);
  CHORALE_CHECK_STATE(edge.wanted(), "[backward] a tensor of shape ", root.sizes(),
                      " does not require a gradient: nothing that leads to it does");
  CHORALE_CHECK(gradient.sizes() == root.sizes(), "[backward] the gradient of a tensor of shape ", root.sizes(),
                " has shape ", gradient.sizes());
  const size_t known = tasks_.size();
  const uint32_t task = task_of(edge);
  if (tasks_.size() > known) discover(task);
  if (gradient.dtype() != root.dtype()) gradient = to(gradient, root.dtype());
  receive(tasks_[task], edge.index, std::move(gradient));
  roots_.push_back(task);
  kept_.push_back(edge);
}

void BackwardRun::capture(const Tensor& input) {
  captures_.push_back({edge_of(input), {}});
  CHORALE_CHECK_STATE(captures_.back().edge.wanted(), "[grad] input ", captures_.size() - 1, " of shape ",
                      input.sizes(), " does not require a gradient");
}

void BackwardRun::mark_needed() {
  std::vector<uint32_t> order(tasks_.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto number = [&](uint32_t i) { return tasks_[i].node ? tasks_[i].node->number : 0; };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return number(a) < number(b); });
  for (Task& task : tasks_) task.needed = task.runs = false;
  for (const Capture& capture : captures_) {
    const void* target =
        capture.edge.node ? static_cast<const void*>(capture.edge.node.get()) : capture.edge.leaf.impl();
    if (const uint32_t task = task_by_target_.find(target); task != PointerMap::kAbsent) tasks_[task].needed = true;
  }
  for (uint32_t i : order) {
    Task& task = tasks_[i];
    if (!task.node) continue;
    for (const Edge& edge : task.node->edges) task.runs |= edge.wanted() && tasks_[task_of(edge)].needed;
    task.needed |= task.runs;
  }
}

void BackwardRun::receive(Task& task, uint32_t index, Tensor gradient) {
  CHORALE_CHECK_STATE(!task.done, "[backward] a gradient arrived at ", task.node ? task.node->name() : "a leaf",
                      " after it had run; add all roots that share a part of the graph before that part runs");
  accumulate(task.gradients[index], std::move(gradient), options_.create_graph);
}

void BackwardRun::make_ready(uint32_t task) {
  ready_.push_back(
      {tasks_[task].node ? tasks_[task].node->number : ~uint64_t{0}, task});  // leaves first: hooks may overlap
  std::push_heap(ready_.begin(), ready_.end());
}

bool BackwardRun::sole_contribution(const Edge& edge) const {
  const uint32_t found = task_by_target_.find(edge.leaf.impl());
  if (found == PointerMap::kAbsent) return false;
  const Task& task = tasks_[found];
  const Slot* slot = slot_of(edge.leaf);
  return task.waiting == 1 && !task.gradients[0].defined() && slot && (!slot->extras || slot->extras->hooks.empty());
}

struct BackwardRun::RuleContext {
  BackwardRun& run;
  Node& node;

  static op::Meta meta(const void* context, size_t input) {
    const Node& node = static_cast<const RuleContext*>(context)->node;
    if (node.inputs) return (*node.inputs)[input];
    const Edge& edge = node.edges[input];
    CHORALE_INVARIANT(edge.wanted(), "a rule asked for the shape of an input that is not saved and needs no gradient");
    return meta_of(edge);
  }
  static Tensor destination(const void* context, size_t input) {
    const auto& self = *static_cast<const RuleContext*>(context);
    const Edge& edge = self.node.edges[input];
    if (!edge.leaf.defined() || self.run.options_.create_graph || !self.run.captures_.empty()) return {};
    if (!self.run.sole_contribution(edge)) return {};
    GradSink* sink = self.run.options_.sink ? self.run.options_.sink : &grad_field_sink();
    return sink->destination(edge.leaf);
  }
};

Tensors BackwardRun::apply_rule(Node& node, std::span<const Tensor> dout, uint32_t needed) {
  CHORALE_CHECK_STATE(!node.released, "[backward of ", node.name(),
                      "] this part of the graph was differentiated before and its saved values were freed; pass "
                      "retain_graph the first time");
  std::optional<op::Under> recorded;
  if (node.stack) recorded.emplace(node.stack->stack());
  if (node.custom) return node.custom->apply(node, dout, needed);
  Tensors in, out;
  in.resize(node.edges.size());
  for (size_t i = 0; i < node.saved_in.size(); ++i) {
    if (node.saved_in[i].defined()) in[i] = node.saved_in[i].unpack(node, i, &node.edges[i]);
  }
  out.resize(node.outputs.size());
  for (size_t i = 0; i < node.saved_out.size(); ++i) {
    if (node.saved_out[i].defined()) out[i] = node.saved_out[i].unpack(node, i, nullptr);
  }
  const RuleContext context{*this, node};
  return node.op->grad({.in = in,
                        .out = out,
                        .dout = dout,
                        .attrs = node.attrs,
                        .needed = needed,
                        .context = &context,
                        .meta_of = RuleContext::meta,
                        .destination_of = RuleContext::destination});
}

// A rule may leave a gradient in the broadcast shape or in a wider dtype.
void BackwardRun::fit(Node& node, const Edge& edge, Tensor& gradient) const {
  const op::Meta* meta = edge.node ? &edge.node->outputs[edge.index] : nullptr;
  const Shape& sizes = meta ? meta->sizes : edge.leaf.sizes();
  const DType dtype = meta ? meta->dtype : edge.leaf.dtype();
  if (!(gradient.sizes() == sizes)) [[unlikely]] {
    CHORALE_INVARIANT(!gradient.is_sparse() && gradient.dims() >= static_cast<int64_t>(sizes.size()),
                      "the gradient of ", node.name(), " has shape ", gradient.sizes(), " for an input of shape ",
                      sizes);
    gradient = sum_to(gradient, sizes);
  }
  if (gradient.dtype() != dtype) [[unlikely]] {
    if (gradient.is_sparse()) {
      const SparseParts& parts = gradient.sparse();
      gradient = Tensor::sparse_coo(parts.indices, to(parts.values, dtype), sizes, parts.coalesced);
      return;
    }
    if (is_complex(gradient.dtype()) && !is_complex(dtype)) gradient = real(gradient);
    gradient = to(gradient, dtype);
  }
}

// The gradient of a part of a tensor whose gradient is there already, from another part for example: it is added in its
// place, where the rule would make a tensor of zeros around it and add the whole.
bool BackwardRun::add_to_part(const Node& node, const Tensor& dout) {
  if (node.op != &op::kSlice && node.op != &op::kSelect) return false;
  if (options_.create_graph || node.hooks || mode.anomaly) return false;
  const Edge& edge = node.edges[0];
  const Tensor& sum = tasks_[task_of(edge)].gradients[edge.index];
  if (!sum.defined() || sum.is_sparse() || !exclusive(sum) || sum.dtype() != dout.dtype()) return false;
  add_(op::call(*node.op, node.attrs, sum), dout);
  return true;
}

void BackwardRun::run_node(uint32_t at) {
  Node& node = *tasks_[at].node;
  tasks_[at].done = true;
  Tensors dout;
  for (Tensor& gradient : tasks_[at].gradients) dout.push_back(std::move(gradient));
  if (node.hooks) {
    for (size_t i = 0; i < node.hooks->on_output.size(); ++i) {
      node.hooks->on_output[i].for_each([&](const GradHook& hook) {
        if (!dout[i].defined()) return;
        if (Tensor replaced = hook(dout[i]); replaced.defined()) dout[i] = std::move(replaced);
      });
      if (node.hooks->retained[i] && dout[i].defined())
        accumulate(*node.hooks->retained[i], dout[i], options_.create_graph);
    }
  }
  for (Capture& capture : captures_) {
    if (capture.edge.node.get() == &node) capture.gradient = dout[capture.edge.index];
  }
  if (!tasks_[at].runs) return;
  if (node.hooks) node.hooks->before.for_each([&](const NodePreHook& hook) { hook({dout.data(), dout.size()}); });

  uint32_t needed = 0;
  for (size_t i = 0; i < node.edges.size(); ++i) {
    const Edge& edge = node.edges[i];
    if (edge.wanted() && (captures_.empty() || tasks_[task_of(edge)].needed)) needed |= 1u << std::min<size_t>(i, 31);
  }
  Tensors din;
  const bool any_gradient = std::any_of(dout.begin(), dout.end(), [](const Tensor& g) { return g.defined(); });
  if (any_gradient && needed && add_to_part(node, dout[0])) {
    din.resize(1);
  } else if ((any_gradient || (node.custom && node.custom->wants_undefined())) && needed) {
    din = apply_rule(node, dout, needed);
    CHORALE_INVARIANT(din.size() == node.edges.size(), "the gradient of ", node.name(), " returned ", din.size(),
                      " gradients for ", node.edges.size(), " inputs");
    if (mode.anomaly) check_finite(node, din);
  } else {
    din.resize(node.edges.size());
  }
  if (node.hooks) node.hooks->after.for_each([&](const NodePostHook& hook) { hook({din.data(), din.size()}, dout); });
  if (!options_.retain_graph) node.release();
  dout.clear();

  for (size_t i = 0; i < node.edges.size(); ++i) {
    const Edge& edge = node.edges[i];
    if (!edge.wanted() || !(needed >> std::min<size_t>(i, 31) & 1u)) continue;
    const uint32_t target = task_of(edge);
    if (din[i].defined()) {
      fit(node, edge, din[i]);
      receive(tasks_[target], edge.index, std::move(din[i]));
    }
    if (--tasks_[target].waiting == 0) make_ready(target);
  }
}

void BackwardRun::run_leaf(uint32_t at) {
  const Tensor leaf = Tensor::share(tasks_[at].leaf);
  tasks_[at].done = true;
  Tensor gradient = std::move(tasks_[at].gradients[0]);
  if (!gradient.defined()) return;
  Slot& slot = slot_for_writing(leaf);
  if (slot.extras) {
    slot.extras->hooks.for_each([&](const GradHook& hook) {
      if (Tensor replaced = hook(gradient); replaced.defined()) gradient = std::move(replaced);
    });
  }
  if (!captures_.empty()) {
    for (Capture& capture : captures_) {
      if (capture.edge.leaf.defined() && capture.edge.leaf.is(leaf)) capture.gradient = gradient;
    }
    return;
  }
  (options_.sink ? *options_.sink : grad_field_sink()).accept(leaf, std::move(gradient), options_.create_graph);
  if (!slot.extras) return;
  slot.extras->accumulated.for_each([&](const LeafHook& hook) { hook(leaf); });
  if (!slot.extras->completed_by_other) run_completed_hooks(slot, leaf);
}

void BackwardRun::run() {
  const ModeScope restore;
  // What rules call follows from what was recorded, not from the scope of autocast that backward happens to be called
  // in.
  const op::Under below(op::current_stack().without(op::Place::kAutocast));
  mode.grad = options_.create_graph;
  mode.inference = false;
  mode.saved_hooks = nullptr;
  struct Current {
    BackwardRun* before;
    ~Current() { current_run = before; }
  } const current{std::exchange(current_run, this)};

  if (!captures_.empty()) mark_needed();
  try {
    run_tasks();
  } catch (...) {
    for (const Task& task : tasks_) {
      if (task.node && task.node->custom && captures_.empty()) task.node->custom->note_failure();
    }
    throw;
  }
}

void BackwardRun::run_tasks() {
  while (true) {
    for (uint32_t root : std::exchange(roots_, {})) {
      if (tasks_[root].waiting == 0) make_ready(root);
    }
    if (!ready_.empty()) {
      std::pop_heap(ready_.begin(), ready_.end());
      const uint32_t task = ready_.back().task;
      ready_.pop_back();
      // A root may stand in the heap twice, or wait again for a root that came later.
      if (tasks_[task].done || tasks_[task].waiting > 0 || !tasks_[task].needed) continue;
      if (tasks_[task].node) {
        run_node(task);
      } else {
        run_leaf(task);
      }
    } else if (!callbacks_.empty()) {
      for (const auto& callback : std::exchange(callbacks_, {})) callback();
    } else if (roots_.empty()) {
      return;
    }
  }
}

}  // namespace chorale::autograd
