// Whole steps without the cost of the calls that make them up: what a function puts on a GPU is recorded as one program
// and replayed.
//
//   Replayed step([&](const std::vector<Tensor>& in) {
//     optimizer.zero_grad();
//     const Tensor loss = cross_entropy(model(in[0]), in[1]);
//     backward(loss);
//     optimizer.step();
//     return std::vector{loss};
//   });
//   for (...) losses += step({x, y})[0];
//
// The first call with inputs of some shapes and dtypes runs the function, the second one records it, and later ones
// replay it: no code of the function runs then. Inputs of another form begin anew, and each form keeps its recording.
// What a recording would get wrong is an error that says so: values that the host reads (item()) or sends (random
// numbers). On devices without programs (the CPU) every call runs the function.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale {

// One thread at a time may use it.
class Replayed {
 public:
  using Function = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;
  explicit Replayed(Function function);
  ~Replayed();
  Replayed(const Replayed&) = delete;
  Replayed& operator=(const Replayed&) = delete;

  // Inputs lie on one device. Results of a replay are overwritten by the next one: clone() what is kept.
  std::vector<Tensor> operator()(const std::vector<Tensor>& in);

  // Where a recording reads inputs of this form; nothing before it is recorded. Calls that pass these very tensors copy
  // nothing.
  std::vector<Tensor> inputs_like(const std::vector<Tensor>& in) const;

  int64_t recordings() const { return recordings_; }
  int64_t replays() const { return replays_; }

 private:
  struct Form;
  Form& form_of(const std::vector<Tensor>& in);
  void record(Form& form);

  const Function function_;
  std::vector<std::unique_ptr<Form>> forms_;
  int64_t recordings_ = 0, replays_ = 0;
};

}  // namespace chorale
