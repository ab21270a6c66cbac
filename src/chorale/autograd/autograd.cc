#include "chorale/autograd/autograd.h"

#include "chorale/autograd/gradient_watch.h"
#include "chorale/base/error.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/view.h"
#include "chorale/trace/trace.h"

namespace chorale {

using autograd::edge_of;
using autograd::Node;
using autograd::Slot;
using autograd::slot_for_writing;
using autograd::slot_of;
using autograd::SlotExtras;

const Tensor& set_requires_grad(const Tensor& x, bool wanted) {
  op::need_defined("set_requires_grad", "x", x);
  CHORALE_CHECK(!wanted || is_differentiable(x.dtype()),
                "[set_requires_grad] only floating and complex tensors have gradients, not ", x.dtype());
  CHORALE_CHECK_STATE(is_leaf(x), "[set_requires_grad] this tensor of shape ", x.sizes(), " was made by ",
                      edge_of(x).node->name(), "; only leaves can be told: detach() it first");
  if (wanted || slot_of(x)) slot_for_writing(x).requires_grad = wanted;
  return x;
}

bool requires_grad(const Tensor& x) { return edge_of(x).wanted(); }
bool is_leaf(const Tensor& x) { return !edge_of(x).node; }
Tensor detach(const Tensor& x) {
  op::need_defined("detach", "x", x);
  return x.is_sparse() ? x.alias() : op::call(op::kDetach, {}, x);
}

Tensor gradient(const Tensor& x) {
  op::need_defined("gradient", "x", x);
  autograd::watch_read(x);
  const Slot* slot = slot_of(x);
  if (!slot) return {};
  return slot->extras && slot->extras->retained ? *slot->extras->retained : slot->grad;
}

void set_gradient(const Tensor& x, const Tensor& gradient) {
  op::need_defined("set_gradient", "x", x);
  CHORALE_CHECK(!gradient.defined() || gradient.sizes() == x.sizes(), "[set_gradient] a tensor of shape ", x.sizes(),
                " cannot have a gradient of shape ", gradient.sizes());
  autograd::watch_replaced(x);
  if (!gradient.defined() && !slot_of(x)) return;
  Slot& slot = slot_for_writing(x);
  (slot.extras && slot.extras->retained ? *slot.extras->retained : slot.grad) = gradient;
}

void set_gradient_destination(const Tensor& x, const Tensor& destination) {
  op::need_defined("set_gradient_destination", "x", x);
  CHORALE_CHECK(!destination.defined() || (destination.sizes() == x.sizes() && destination.dtype() == x.dtype()),
                "[set_gradient_destination] expected ", x.dtype(), " ", x.sizes(), ", found ", destination.dtype(), " ",
                destination.sizes());
  slot_for_writing(x).extras_for_writing().destination = destination;
}

void retain_grad(const Tensor& x) {
  op::need_defined("retain_grad", "x", x);
  const autograd::Edge edge = edge_of(x);
  CHORALE_CHECK_STATE(edge.wanted(), "[retain_grad] this tensor of shape ", x.sizes(), " does not require a gradient");
  if (edge.leaf.defined()) return;
  SlotExtras& extras = slot_for_writing(x).extras_for_writing();
  if (!extras.retained) extras.retained = std::make_shared<Tensor>();
  edge.node->hooks_for_writing().retained[edge.index] = extras.retained;
}

namespace {
// The gradient of a root that was given none.
Tensor ones_for(const char* function, const Tensor& root) {
  CHORALE_CHECK(root.elems() == 1, "[", function, "] a gradient must be given for an output of shape ", root.sizes(),
                "; only one element needs none");
  return ones_like(root);
}
}  // namespace

void backward(const Tensor& root, const Tensor& gradient, const BackwardOptions& options) {
  backward({&root, 1}, {&gradient, 1}, options);
}

void backward(std::span<const Tensor> roots, std::span<const Tensor> gradients, const BackwardOptions& options) {
  CHORALE_CHECK(gradients.empty() || gradients.size() == roots.size(), "[backward] ", roots.size(), " tensors but ",
                gradients.size(), " gradients");
  for (const Tensor& root : roots) op::need_defined("backward", "the tensor to begin at", root);
  const trace::Span span("backward");
  BackwardOptions own = options;
  own.retain_graph |= options.create_graph;
  autograd::BackwardRun run(own);
  for (size_t i = 0; i < roots.size(); ++i) {
    const bool given = i < gradients.size() && gradients[i].defined();
    run.add_root(roots[i], given ? gradients[i] : ones_for("backward", roots[i]));
  }
  run.run();
}

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const GradOptions& options) {
  CHORALE_CHECK(options.grad_outputs.empty() || options.grad_outputs.size() == outputs.size(), "[grad] ",
                outputs.size(), " outputs but ", options.grad_outputs.size(), " gradients of them");
  autograd::BackwardRun run(
      {.retain_graph = options.retain_graph || options.create_graph, .create_graph = options.create_graph});
  for (const Tensor& output : outputs) op::need_defined("grad", "an output", output);
  for (const Tensor& input : inputs) run.capture(input);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool given = i < options.grad_outputs.size() && options.grad_outputs[i].defined();
    run.add_root(outputs[i], given ? options.grad_outputs[i] : ones_for("grad", outputs[i]));
  }
  run.run();
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < inputs.size(); ++i) {
    gradients.push_back(run.captured(i));
    CHORALE_CHECK_STATE(options.allow_unused || gradients.back().defined(), "[grad] input ", i, " of shape ",
                        inputs[i].sizes(), " was not used for the outputs; set allow_unused if that is meant");
  }
  return gradients;
}

namespace {
template <class Hook>
void need_hook(const char* function, const Hook& hook) {
  CHORALE_CHECK(hook, "[", function, "] the hook is an empty function");
}
}  // namespace

HookHandle on_gradient(const Tensor& x, autograd::GradHook hook) {
  op::need_defined("on_gradient", "x", x);
  need_hook("on_gradient", hook);
  const autograd::Edge edge = edge_of(x);
  CHORALE_CHECK_STATE(edge.wanted(), "[on_gradient] this tensor of shape ", x.sizes(), " does not require a gradient");
  if (edge.leaf.defined()) return HookHandle(slot_for_writing(x).extras_for_writing().hooks.add(std::move(hook)));
  return HookHandle(edge.node->hooks_for_writing().on_output[edge.index].add(std::move(hook)));
}

namespace {
autograd::LeafHook with_sink(const char* function, std::function<void(const Tensor& leaf)> hook) {
  need_hook(function, hook);
  return [hook = std::move(hook)](const Tensor& leaf, autograd::GradSink&) { hook(leaf); };
}
}  // namespace

HookHandle after_accumulate(const Tensor& x, autograd::LeafHook hook) {
  op::need_defined("after_accumulate", "x", x);
  need_hook("after_accumulate", hook);
  CHORALE_CHECK_STATE(edge_of(x).leaf.defined(), "[after_accumulate] needs a leaf that requires a gradient");
  return HookHandle(slot_for_writing(x).extras_for_writing().accumulated.add(std::move(hook)));
}

HookHandle after_accumulate(const Tensor& x, std::function<void(const Tensor& leaf)> hook) {
  return after_accumulate(x, with_sink("after_accumulate", std::move(hook)));
}

HookHandle after_complete(const Tensor& x, autograd::LeafHook hook) {
  op::need_defined("after_complete", "x", x);
  need_hook("after_complete", hook);
  CHORALE_CHECK_STATE(edge_of(x).leaf.defined(), "[after_complete] needs a leaf that requires a gradient");
  return HookHandle(slot_for_writing(x).extras_for_writing().completed.add(std::move(hook)));
}
HookHandle after_complete(const Tensor& x, std::function<void(const Tensor& leaf)> hook) {
  return after_complete(x, with_sink("after_complete", std::move(hook)));
}
void set_completed_by_other(const Tensor& x, bool claimed) {
  op::need_defined("set_completed_by_other", "x", x);
  slot_for_writing(x).extras_for_writing().completed_by_other = claimed;
}
void complete_gradient(const Tensor& x) {
  op::need_defined("complete_gradient", "x", x);
  if (const Slot* slot = slot_of(x)) autograd::run_completed_hooks(*slot, x, autograd::current_sink());
}

namespace {
Node& node_of(const char* function, const Tensor& x) {
  op::need_defined(function, "x", x);
  const autograd::Edge edge = edge_of(x);
  CHORALE_CHECK_STATE(edge.node, "[", function, "] no recorded op made this tensor of shape ", x.sizes());
  return *edge.node;
}
}  // namespace

HookHandle before_node(const Tensor& x, autograd::NodePreHook hook) {
  need_hook("before_node", hook);
  return HookHandle(node_of("before_node", x).hooks_for_writing().before.add(std::move(hook)));
}
HookHandle after_node(const Tensor& x, autograd::NodePostHook hook) {
  need_hook("after_node", hook);
  return HookHandle(node_of("after_node", x).hooks_for_writing().after.add(std::move(hook)));
}

void at_end_of_backward(std::function<void()> callback) {
  autograd::BackwardRun* run = autograd::BackwardRun::current();
  need_hook("at_end_of_backward", callback);
  CHORALE_CHECK_STATE(run, "[at_end_of_backward] no backward is running in this thread");
  run->at_end(std::move(callback));
}

}  // namespace chorale
