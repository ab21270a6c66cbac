// The two kinds of tensor that a module owns. Both are tensors: handles, passed to any function without cost.
#pragma once

#include "chorale/autograd/autograd.h"

namespace chorale::nn {

// What training changes. A default-constructed one is absent (a layer without bias).
class Parameter : public Tensor {
 public:
  Parameter() = default;
  // The tensor becomes a leaf that asks for gradients, unless told otherwise; StateError if an op made it.
  explicit Parameter(const Tensor& value, bool with_gradient = true) : Tensor(value) {
    set_requires_grad(*this, with_gradient);
  }
};

// What belongs to a module's state without being trained: running statistics, tables. Only a persistent one is saved.
class Buffer : public Tensor {
 public:
  Buffer() = default;
  explicit Buffer(const Tensor& value, bool persistent = true) : Tensor(value), persistent_(persistent) {}
  bool persistent() const { return persistent_; }

 private:
  bool persistent_ = true;
};

}  // namespace chorale::nn
