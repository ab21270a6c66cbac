// Backward over several workers. Inside a context, calls of functions on other workers are recorded; backward() follows
// them, and each worker keeps the gradients of its own tensors under the context's number, apart from the tensors' own
// gradients.
//
//   dist_autograd::Context context(agent);
//   Tensor loss = sum(agent.call<embed>("server", ids));
//   context.backward({loss});
//   context.gradient(weight);
#pragma once

#include <utility>
#include <vector>

#include "chorale/dist_autograd/contexts.h"

namespace chorale::dist_autograd {

class Context {
 public:
  // The thread's context until the end of this object's life. RpcError (kNestedContext) when it has one already.
  explicit Context(Contexts& contexts) : contexts_(contexts), scope_(contexts, contexts.open()) {}
  // Tells the workers that have a part of it.
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  uint64_t id() const { return scope_.id(); }
  // Roots have one element each. Gradients go to the context, on this worker and on the others.
  void backward(const std::vector<Tensor>& roots, bool retain_graph = false) {
    contexts_.backward(id(), roots, retain_graph);
  }
  // The gradient of a tensor of this worker; undefined where there is none.
  Tensor gradient(const Tensor& leaf) const { return contexts_.get(id())->gradients.gradient(leaf); }
  std::vector<std::pair<Tensor, Tensor>> gradients() const { return contexts_.get(id())->gradients.entries(); }

 private:
  Contexts& contexts_;
  Scope scope_;
};

// The number of this thread's context, also inside a function that was called in one; 0: none.
inline uint64_t current_context() { return Scope::current(); }

}  // namespace chorale::dist_autograd
