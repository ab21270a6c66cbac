// What the normalisation kernels share.
#pragma once

#include <cmath>

#include "chorale/kernel/cpu/support/copy.h"

namespace chorale::kernel::cpu {

// A parameter in C, or null where there is none.
template <class C>
class Parameter {
 public:
  explicit Parameter(const Tensor& p) : tensor_(p.defined() ? contiguous(p, dtype_of<C>) : Tensor()) {}
  const C* data() const { return tensor_.defined() ? tensor_.data<C>() : nullptr; }

 private:
  Tensor tensor_;
};

template <class C>
C reciprocal_root(C variance, double eps) {
  return C(1) / std::sqrt(variance + static_cast<C>(eps));
}

}  // namespace chorale::kernel::cpu
