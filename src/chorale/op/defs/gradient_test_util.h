// Gradients at given places, for tests.
#pragma once

#include <functional>
#include <vector>

#include "chorale/autograd/autograd.h"
#include "chorale/op/creation.h"

namespace chorale {

inline Tensor vector(const std::vector<double>& list) {
  return Tensor::from(list, {static_cast<int64_t>(list.size())});
}

// The gradient of the sum of f's results.
inline std::vector<double> slope(const std::function<Tensor(const Tensor&)>& f, const Tensor& x) {
  set_requires_grad(x);
  const Tensor y = f(x);
  const Tensor dx = grad({y}, {x}, {.grad_outputs = {ones(y.sizes(), y.dtype())}})[0];
  return dx.to_vector<double>();
}

}  // namespace chorale
