// Automatic differentiation: what users call.
//
//   set_requires_grad(w);
//   backward(loss(w));
//   gradient(w);
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "chorale/autograd/backward.h"
#include "chorale/autograd/mode.h"

namespace chorale {

// Asks for gradients of a leaf (a tensor that no recorded op made); returns it. StateError for a non-leaf or an
// integral dtype.
const Tensor& set_requires_grad(const Tensor& x, bool wanted = true);
bool requires_grad(const Tensor& x);
bool is_leaf(const Tensor& x);
// The same bytes, with no history.
Tensor detach(const Tensor& x);

// The accumulated gradient of a leaf, or of a tensor after retain_grad(); undefined before the first backward.
Tensor gradient(const Tensor& x);
// Replaces it; undefined clears it.
void set_gradient(const Tensor& x, const Tensor& gradient);
// Where the next gradient of a leaf is to be written when it has none: gradients stay views of one buffer.
void set_gradient_destination(const Tensor& x, const Tensor& destination);
// Keeps the gradient of a tensor that is no leaf.
void retain_grad(const Tensor& x);

using autograd::BackwardOptions;
// Adds d(root)/d(leaf) to the gradient of every leaf. `gradient` is that of the root; it may be left out for one
// element.
void backward(const Tensor& root, const Tensor& gradient = {}, const BackwardOptions& options = {});
void backward(std::span<const Tensor> roots, std::span<const Tensor> gradients, const BackwardOptions& options = {});

struct GradOptions {
  std::vector<Tensor> grad_outputs{};  // one per output, or none when every output has one element
  bool retain_graph = false;
  bool create_graph = false;
  bool allow_unused = false;  // an input that outputs do not depend on gets an undefined gradient instead of an error
};
// Gradients of the sum of outputs with respect to inputs; no leaf's own gradient changes.
std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const GradOptions& options = {});

// Removes a hook; doing it twice, or after the tensor died, is harmless. Dropping the handle keeps the hook.
class HookHandle {
 public:
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() { remove_(); }

 private:
  std::function<void()> remove_;
};
// Runs when the gradient of x is complete; a defined result replaces it.
HookHandle on_gradient(const Tensor& x, autograd::GradHook hook);
// Runs after the gradient was accumulated into leaf x, once per backward.
HookHandle after_accumulate(const Tensor& x, autograd::LeafHook hook);
// Runs when the gradient of leaf x is final: behind all after_accumulate hooks, or, where somebody else completes it (a
// reduction over ranks, which sets the gradient later), when that is done. What consumes gradients belongs here.
HookHandle after_complete(const Tensor& x, autograd::LeafHook hook);
// Claims leaf x: backward no longer completes its gradient, complete_gradient() does.
void set_completed_by_other(const Tensor& x, bool claimed);
void complete_gradient(const Tensor& x);
// Run before and after the gradient rule of the op that made x; they may replace gradients.
HookHandle before_node(const Tensor& x, autograd::NodePreHook hook);
HookHandle after_node(const Tensor& x, autograd::NodePostHook hook);
// Runs once at the end of the backward that this thread is in; StateError outside of one.
void at_end_of_backward(std::function<void()> callback);

// A differentiable function that is not made of ops, or whose gradient is better written by hand. Derive, then call
// apply<MyFunction>({inputs}, constructor arguments…). Members may hold anything that is no tensor of the graph.
class Function {
 public:
  virtual ~Function() = default;
  virtual const char* name() const = 0;
  // Runs without recording.
  virtual std::vector<Tensor> forward(const std::vector<Tensor>& in) = 0;
  // Gets one gradient per output (zeros where none arrived), gives one per input (undefined for none). Recorded when
  // second derivatives are asked for.
  virtual std::vector<Tensor> backward(const std::vector<Tensor>& dout) = 0;

 protected:
  // In forward: keeps inputs, outputs or intermediate values for backward, with a check against overwriting.
  void save_for_backward(std::vector<Tensor> tensors) { to_save_ = std::move(tensors); }
  // In backward: those values.
  const std::vector<Tensor>& saved() const { return unpacked_; }
  // In forward: this output has no gradient.
  void mark_non_differentiable(const Tensor& output) { non_differentiable_.push_back(output); }
  // In backward: whether the gradient of input i is wanted.
  bool needs(size_t i) const { return needed_ >> i & 1u; }

 private:
  friend struct FunctionBackward;
  friend std::vector<Tensor> apply_function(std::unique_ptr<Function> function, const std::vector<Tensor>& in);
  std::vector<Tensor> to_save_, unpacked_, non_differentiable_;
  uint32_t needed_ = 0;
};
std::vector<Tensor> apply_function(std::unique_ptr<Function> function, const std::vector<Tensor>& in);
template <class F, class... Args>
std::vector<Tensor> apply(const std::vector<Tensor>& in, Args&&... args) {
  return apply_function(std::make_unique<F>(std::forward<Args>(args)...), in);
}

// Activation checkpointing: runs `function`, keeps its inputs only, and computes what backward needs again when it
// needs it, with the same random numbers. Hooks, second derivatives and nesting work as without it. The function must
// do the same when it is called again.
std::vector<Tensor> checkpoint(std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function,
                               const std::vector<Tensor>& in);

}  // namespace chorale
