#include "chorale/autograd/backward.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "chorale/autograd/advance.h"
#include "chorale/autograd/mode.h"
#include "chorale/base/error.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/sparse.h"

namespace chorale::autograd {
namespace {

// What a hook returns takes the gradient's place, so it must be one of the same tensor.
void apply_hook(const GradHook& hook, Tensor& gradient) {
  Tensor replaced = hook(gradient);
  if (!replaced.defined()) return;
  CHORALE_CHECK(replaced.sizes() == gradient.sizes(), "[on_gradient] a hook returned a gradient of shape ",
                replaced.sizes(), " for a tensor of shape ", gradient.sizes());
  gradient = std::move(replaced);
}

constinit thread_local BackwardRun* current_run = nullptr;

// What advance() sets and reads: whether a run may wait for late roots, and whether it has returned because it may not.
struct Waiting {
  bool allowed = true;
  bool left = false;
};
constinit thread_local Waiting waiting;

Tensor in_dtype(Tensor gradient, DType dtype) {
  return gradient.dtype() == dtype ? std::move(gradient) : to(gradient, dtype);
}

void check_finite(const Node& node, std::span<const Tensor> din) {
  for (size_t i = 0; i < din.size(); ++i) {
    if (!din[i].defined() || din[i].is_sparse()) continue;
    const NoGrad quiet;
    CHORALE_CHECK_STATE(!any(isnan(din[i])).item<bool>(), "[anomaly] the gradient of ", node.name(), " (call number ",
                        node.number, ") for its input ", i, " of shape ", din[i].sizes(), " has NaN");
  }
}

}  // namespace

void run_completed_hooks(const Slot& slot, const Tensor& leaf, GradSink& sink) {
  if (slot.extras) slot.extras->completed.for_each([&](const LeafHook& hook) { hook(leaf, sink); });
}

GradSink& current_sink() { return current_run ? current_run->sink() : grad_field_sink(); }

BackwardRun* BackwardRun::current() { return current_run; }

BackwardRun::BackwardRun(BackwardOptions options)
    : options_(options), reuses_memory_(!options.create_graph && op::current_stack().may_reuse_memory()) {}

BackwardRun::~BackwardRun() {
  if (inbox_) inbox_->close();
}

// ---- the graph

uint32_t BackwardRun::task_of(const Edge& edge) {
  const void* target = edge.node ? static_cast<const void*>(edge.node.get()) : edge.leaf.impl();
  const auto [task, fresh] = task_by_target_.insert(target, static_cast<uint32_t>(tasks_.size()));
  if (fresh) {
    Task& added = tasks_.emplace_back();
    added.node = edge.node.get();
    added.leaf = edge.node ? nullptr : edge.leaf.impl();
    added.gradients.resize(edge.node ? edge.node->outputs.size() : 1);
    // It runs when a root leads to it that was not withdrawn. (Where something is captured, mark_needed() says it.)
    added.runs = !captures_.empty();
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

uint32_t BackwardRun::task_of_root(const Edge& edge) {
  const size_t known = tasks_.size();
  const uint32_t task = task_of(edge);
  if (tasks_.size() > known) discover(task);
  kept_.push_back(edge);
  return task;
}

void BackwardRun::add_root(const Tensor& root, Tensor gradient) {
  check_root(root, gradient);
  add_root(edge_of(root), std::move(gradient));
}

void BackwardRun::add_root(const Edge& edge, Tensor gradient) {
  const uint32_t task = task_of_root(edge);
  receive(tasks_[task], edge.index, in_dtype(std::move(gradient), spec_of(edge).dtype));
  tasks_[task].runs = true;
  roots_.push_back(task);
}

LateRoot BackwardRun::expect_root(const Edge& root) {
  CHORALE_CHECK_STATE(root.wanted(), "[backward] a root was announced that leads to no leaf");
  const uint32_t task = task_of_root(root);
  CHORALE_CHECK_STATE(!tasks_[task].done, "[backward] a root was announced after its turn: announce it earlier");
  if (!inbox_) inbox_ = std::make_shared<BackwardInbox>();
  ++tasks_[task].waiting;
  late_.push_back(task);
  return {inbox_, root, task};
}

LateRoot BackwardRun::expect_root() {
  if (!inbox_) inbox_ = std::make_shared<BackwardInbox>();
  return {inbox_, {}, BackwardInbox::kUnnamed};
}

void BackwardRun::take_late_roots() {
  for (BackwardInbox::Delivery& came : inbox_->take()) {
    if (came.task == BackwardInbox::kUnnamed) {
      if (came.root.wanted()) add_root(came.root, std::move(came.gradients[0]));
      continue;
    }
    for (uint32_t i = 0; i < came.gradients.size(); ++i) {
      if (!came.gradients[i].defined()) continue;
      Task& task = tasks_[came.task];
      const DType dtype = task.node ? task.node->outputs[i].dtype : task.leaf->dtype;
      receive(task, i, in_dtype(std::move(came.gradients[i]), dtype));
    }
    if (!came.gradients.empty()) tasks_[came.task].runs = true;
    late_.erase(std::find(late_.begin(), late_.end(), came.task));
    --tasks_[came.task].waiting;
    roots_.push_back(came.task);
  }
}

// False when nothing is expected any more.
bool BackwardRun::wait_for_late_root() {
  const BackwardInbox::Wait ended = inbox_->wait(options_.deadline);
  CHORALE_CHECK_STATE(ended != BackwardInbox::Wait::kDeadline,
                      "[backward] roots were expected that did not come in time: ", names_of_late_roots());
  return ended == BackwardInbox::Wait::kNews;
}

std::string BackwardRun::names_of_late_roots() const {
  std::string names;
  for (const uint32_t task : late_) {
    names += concat(names.empty() ? "" : ", ", tasks_[task].node ? tasks_[task].node->name() : "a leaf");
  }
  return names.empty() ? "none of them was named" : names;
}

void BackwardRun::capture(const Tensor& input) {
  op::need_defined("grad", "an input", input);
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
    if (const uint32_t task = task_by_target_.find(target); task != base::PointerMap::kAbsent)
      tasks_[task].needed = true;
  }
  for (uint32_t i : order) {
    Task& task = tasks_[i];
    if (!task.node) continue;
    for (const Edge& edge : task.node->edges) task.runs |= edge.wanted() && tasks_[task_of(edge)].needed;
    task.needed |= task.runs;
  }
}

// ---- gradients on their way

// True when nobody else can see this tensor's bytes, so that it may be overwritten or kept.
bool BackwardRun::owns(const Tensor& x) const {
  return reuses_memory_ && x.use_count() == 1 && !x.extension() && x.storage()->use_count() == 1 && !slot_of(x) &&
         x.is_contiguous();
}

void BackwardRun::add_up(Tensor& sum, Tensor gradient) const {
  if (!sum.defined()) {
    sum = std::move(gradient);
  } else if (sum.is_sparse() || gradient.is_sparse()) {
    sum = sparse_add(sum, gradient);
  } else if (owns(sum) && !gradient.extension()) {
    add_(sum, gradient);
  } else {
    sum = add(sum, gradient);
  }
}

void BackwardRun::receive(Task& task, uint32_t index, Tensor gradient) {
  CHORALE_CHECK_STATE(!task.done, "[backward] a gradient arrived at ", task.node ? task.node->name() : "a leaf",
                      " after it had run; add all roots that share a part of the graph before that part runs");
  add_up(task.gradients[index], std::move(gradient));
}

void BackwardRun::make_ready(uint32_t task) {
  ready_.push_back(
      {tasks_[task].node ? tasks_[task].node->number : ~uint64_t{0}, task});  // leaves first: hooks may overlap
  std::push_heap(ready_.begin(), ready_.end());
}

bool BackwardRun::sole_contribution(const Edge& edge) const {
  const uint32_t found = task_by_target_.find(edge.leaf.impl());
  if (found == base::PointerMap::kAbsent) return false;
  const Task& task = tasks_[found];
  const Slot* slot = slot_of(edge.leaf);
  return task.waiting == 1 && !task.gradients[0].defined() && slot && (!slot->extras || slot->extras->hooks.empty());
}

class BackwardRun::RuleContext final : public op::GradContext {
 public:
  RuleContext(const BackwardRun& run, const Node& node) : run_(run), node_(node) {}

  TensorSpec spec(size_t input) const override {
    if (node_.inputs) return (*node_.inputs)[input];
    const Edge& edge = node_.edges[input];
    CHORALE_INVARIANT(edge.wanted(), "a rule asked for the shape of an input that is not saved and needs no gradient");
    return spec_of(edge);
  }
  Tensor destination(size_t input) const override {
    const Edge& edge = node_.edges[input];
    if (!edge.leaf.defined() || run_.options_.create_graph || !run_.captures_.empty()) return {};
    return run_.sole_contribution(edge) ? run_.sink().destination(edge.leaf) : Tensor{};
  }

 private:
  const BackwardRun& run_;
  const Node& node_;
};

Tensors BackwardRun::apply_rule(Node& node, std::span<const Tensor> dout, op::InputSet needed) {
  CHORALE_CHECK_STATE(!node.released, "[backward of ", node.name(),
                      "] this part of the graph was differentiated before and its saved values were freed; pass "
                      "retain_graph the first time, or detach() what is carried from one step to the next (a hidden "
                      "state)");
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
  const RuleContext context(*this, node);
  return node.op->grad({.in = in, .out = out, .dout = dout, .attrs = node.attrs, .needed = needed, .context = context});
}

// A rule may leave a gradient in the broadcast shape or in a wider dtype.
void BackwardRun::fit(Node& node, const Edge& edge, Tensor& gradient) const {
  const TensorSpec* spec = edge.node ? &edge.node->outputs[edge.index] : nullptr;
  const Shape& sizes = spec ? spec->sizes : edge.leaf.sizes();
  const DType dtype = spec ? spec->dtype : edge.leaf.dtype();
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
  if (!reuses_memory_ || !node.op || !node.op->part || node.hooks || mode.anomaly) return false;
  const Edge& edge = node.edges[0];
  const Tensor& sum = tasks_[task_of(edge)].gradients[edge.index];
  if (!sum.defined() || !owns(sum) || sum.dtype() != dout.dtype()) return false;
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
        if (dout[i].defined()) apply_hook(hook, dout[i]);
      });
      if (node.hooks->retained[i] && dout[i].defined()) add_up(*node.hooks->retained[i], dout[i]);
    }
  }
  for (Capture& capture : captures_) {
    if (capture.edge.node.get() == &node) capture.gradient = dout[capture.edge.index];
  }
  if (!tasks_[at].runs) return;
  if (node.hooks) node.hooks->before.for_each([&](const NodePreHook& hook) { hook({dout.data(), dout.size()}); });

  op::InputSet needed;
  for (size_t i = 0; i < node.edges.size(); ++i) {
    const Edge& edge = node.edges[i];
    if (edge.wanted() && (captures_.empty() || tasks_[task_of(edge)].needed)) needed.add(i);
  }
  Tensors din;
  const bool any_gradient = std::any_of(dout.begin(), dout.end(), [](const Tensor& g) { return g.defined(); });
  const bool is_due = any_gradient && !needed.empty();
  if (is_due && add_to_part(node, dout[0])) {
    din.resize(1);
  } else if (is_due || (node.custom && node.custom->always_runs())) {
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
    if (!edge.wanted() || !needed.has(i)) continue;
    const uint32_t target = task_of(edge);
    if (din[i].defined()) {
      fit(node, edge, din[i]);
      receive(tasks_[target], edge.index, std::move(din[i]));
    }
    if (captures_.empty()) tasks_[target].runs = true;
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
    slot.extras->hooks.for_each([&](const GradHook& hook) { apply_hook(hook, gradient); });
  }
  if (!captures_.empty()) {
    for (Capture& capture : captures_) {
      if (capture.edge.leaf.defined() && capture.edge.leaf.is(leaf)) capture.gradient = gradient;
    }
    return;
  }
  const Arrival arrival{.create_graph = options_.create_graph, .owned = owns(gradient)};
  sink().accept(leaf, std::move(gradient), arrival);
  if (!slot.extras) return;
  slot.extras->accumulated.for_each([&](const LeafHook& hook) { hook(leaf, sink()); });
  if (!slot.extras->completed_by_other) run_completed_hooks(slot, leaf, sink());
}

void BackwardRun::run() {
  const ModeScope restore;
  // What rules call follows from what was recorded, not from the scope of autocast that backward happens to be called
  // in.
  std::optional<op::Under> below;
  if (op::current_stack().at(op::Place::kAutocast)) below.emplace(op::current_stack().without(op::Place::kAutocast));
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
    if (inbox_) inbox_->close();
    for (const Task& task : tasks_) {
      if (task.node && task.node->custom && captures_.empty()) task.node->custom->note_failure();
    }
    throw;
  }
}

void BackwardRun::run_tasks() {
  // Only roots that were withdrawn lead to it: nothing runs, and nothing is freed, so that it can be differentiated
  // later.
  const auto pass_by = [&](uint32_t at) {
    tasks_[at].done = true;
    if (!tasks_[at].node) return;
    for (const Edge& edge : tasks_[at].node->edges) {
      if (!edge.wanted()) continue;
      const uint32_t target = task_of(edge);
      if (--tasks_[target].waiting == 0) make_ready(target);
    }
  };
  const auto must_leave = [&] {
    const auto now = inbox_->wait(Deadline(Deadline::Clock::now()));
    waiting.left = now == BackwardInbox::Wait::kDeadline;
    return waiting.left;
  };
  while (true) {
    if (inbox_) take_late_roots();
    for (uint32_t root : std::exchange(roots_, {})) {
      if (tasks_[root].waiting == 0) make_ready(root);
    }
    if (!ready_.empty()) {
      std::pop_heap(ready_.begin(), ready_.end());
      const uint32_t task = ready_.back().task;
      ready_.pop_back();
      // A root may stand in the heap twice, or wait again for a root that came later.
      if (tasks_[task].done || tasks_[task].waiting > 0 || !tasks_[task].needed) continue;
      if (captures_.empty() && !tasks_[task].runs) {
        pass_by(task);
      } else if (tasks_[task].node) {
        run_node(task);
      } else {
        run_leaf(task);
      }
    } else if (inbox_ && !waiting.allowed && must_leave()) {  // NOLINT(bugprone-branch-clone): the order decides
      return;
    } else if (inbox_ && wait_for_late_root()) {
      continue;
    } else if (!callbacks_.empty()) {
      for (const auto& callback : std::exchange(callbacks_, {})) callback();
    } else if (roots_.empty()) {
      return;
    }
  }
}

bool advance(BackwardRun& run) {
  struct Restore {
    Waiting before;
    ~Restore() { waiting = before; }
  } const restore{std::exchange(waiting, Waiting{.allowed = false})};
  run.run();
  return !waiting.left;
}

}  // namespace chorale::autograd
