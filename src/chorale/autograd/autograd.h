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
#include "chorale/autograd/function.h"
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

// Removes a hook; doing it twice, or after the tensor died, is harmless. Dropping the handle keeps the hook. A handle
// that was moved from has nothing to remove.
class HookHandle {
 public:
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {
    if (remove_) remove_();
  }

 private:
  std::function<void()> remove_;
};
// Runs when the gradient of x is complete; a defined result replaces it.
HookHandle on_gradient(const Tensor& x, autograd::GradHook hook);
// Hooks of leaves get the leaf and, if they take it, the sink that its gradient went to: gradient(leaf) is the gradient
// only where backward was given no other sink.
// Runs after the gradient was accumulated into leaf x, once per backward.
HookHandle after_accumulate(const Tensor& x, autograd::LeafHook hook);
HookHandle after_accumulate(const Tensor& x, std::function<void(const Tensor& leaf)> hook);
// Runs when the gradient of leaf x is final: behind all after_accumulate hooks, or, where somebody else completes it (a
// reduction over ranks, which sets the gradient later), when that is done. What consumes gradients belongs here.
HookHandle after_complete(const Tensor& x, autograd::LeafHook hook);
HookHandle after_complete(const Tensor& x, std::function<void(const Tensor& leaf)> hook);
// Claims leaf x: backward no longer completes its gradient, complete_gradient() does.
void set_completed_by_other(const Tensor& x, bool claimed);
void complete_gradient(const Tensor& x);
// Run before and after the gradient rule of the op that made x; they may replace gradients.
HookHandle before_node(const Tensor& x, autograd::NodePreHook hook);
HookHandle after_node(const Tensor& x, autograd::NodePostHook hook);
// Runs once at the end of the backward that this thread is in; StateError outside of one.
void at_end_of_backward(std::function<void()> callback);

}  // namespace chorale
