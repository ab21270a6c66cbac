// Leaves for tests of autograd, and what is in them.
#pragma once

#include <initializer_list>
#include <vector>

#include "chorale/autograd/autograd.h"

namespace chorale {

inline Tensor leaf(std::initializer_list<double> values) {
  const Tensor x = Tensor::from(values, {static_cast<int64_t>(values.size())});
  set_requires_grad(x);
  return x;
}
using Values = std::vector<double>;
inline Values values(const Tensor& x) { return x.to_vector<double>(); }

}  // namespace chorale
