// Functions around a module's call. They see tensors, wherever in arguments and results those are (visit_tensors).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chorale/autograd/autograd.h"

namespace chorale::nn {

class Module;

// Called before forward; may replace the tensors among the arguments.
using ForwardPreHook = std::function<void(Module&, std::vector<Tensor>& inputs)>;
// Tells such a hook the name of each input, that of its field where an argument is a struct that lists them
// (CHORALE_TENSORS), else ""; behind them the names of fields without a tensor. Empty where no argument is one.
const std::vector<std::string>& input_names();
// Called after it; may replace those of the result.
using ForwardHook = std::function<void(Module&, const std::vector<Tensor>& inputs, std::vector<Tensor>& outputs)>;
// When the gradients of all outputs are complete; may replace them. Hooks of backward get no module: it may have moved
// since forward.
using BackwardPreHook = std::function<void(std::vector<Tensor>& output_gradients)>;
// When the gradients of the inputs are complete (undefined where an input asks for none); may replace those. It runs
// right behind the pre-hooks, without input gradients, when no input asks for any.
using BackwardHook =
    std::function<void(std::vector<Tensor>& input_gradients, const std::vector<Tensor>& output_gradients)>;

struct HookLists;

// A module's hooks. A copy of a module has hooks of its own, which start as the same ones.
class Hooks {
 public:
  Hooks() = default;
  Hooks(const Hooks& other);
  Hooks(Hooks&&) = default;
  Hooks& operator=(Hooks other) {
    lists_ = std::move(other.lists_);
    return *this;
  }
  explicit operator bool() const { return lists_ != nullptr; }

  template <class Hook>
  HookHandle add(Hook hook);

 private:
  friend class HookedCall;
  std::shared_ptr<HookLists> lists_;  // shared with handles, which survive the module
};

// One call of a module that has hooks.
class HookedCall {
 public:
  explicit HookedCall(Module& module);
  ~HookedCall();
  // Both return what is to be used instead.
  std::vector<Tensor> before(std::vector<Tensor> inputs, const std::vector<std::string>& names);
  std::vector<Tensor> after(std::vector<Tensor> outputs);

 private:
  struct Backward;
  Module& module_;
  std::shared_ptr<HookLists> lists_;
  std::vector<Tensor> inputs_;
  std::shared_ptr<Backward> backward_;
};

}  // namespace chorale::nn
