// Functions whose gradient a user wrote, and activation checkpointing.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "chorale/op/input_set.h"
#include "chorale/tensor/tensor.h"

namespace chorale {

class Function;

// What a Function kept for backward. A place that does not exist is an error that names the function.
class SavedTensors {
 public:
  const Tensor& operator[](size_t i) const {
    if (i >= tensors_.size()) [[unlikely]]
      raise_missing(i);
    return tensors_[i];
  }
  const Tensor& at(size_t i) const { return (*this)[i]; }
  size_t size() const { return tensors_.size(); }
  bool empty() const { return tensors_.empty(); }
  auto begin() const { return tensors_.begin(); }
  auto end() const { return tensors_.end(); }

 private:
  friend struct FunctionBackward;
  friend std::vector<Tensor> apply_function(std::unique_ptr<Function> function, const std::vector<Tensor>& in);
  [[noreturn]] void raise_missing(size_t i) const;
  std::vector<Tensor> tensors_;
  const char* function_ = "Function";  // its name, from the call of forward on
};

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
  // Forward keeps inputs, outputs or intermediate values for backward with it; that they are not overwritten is
  // checked.
  void save_for_backward(std::vector<Tensor> tensors) { to_save_ = std::move(tensors); }
  // Backward reads those values here.
  const SavedTensors& saved() const { return saved_; }
  // Forward says with it that this output has no gradient.
  void mark_non_differentiable(const Tensor& output) { non_differentiable_.push_back(output); }
  // Backward asks with it whether the gradient of input i is wanted.
  bool needs(size_t i) const { return needed_.has(i); }

 private:
  friend struct FunctionBackward;
  friend std::vector<Tensor> apply_function(std::unique_ptr<Function> function, const std::vector<Tensor>& in);
  std::vector<Tensor> to_save_, non_differentiable_;
  SavedTensors saved_;
  op::InputSet needed_;
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
