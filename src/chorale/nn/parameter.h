// The two kinds of tensor that a module owns. Both are tensors: handles, passed to any function without cost.
#pragma once

#include <utility>

#include "chorale/autograd/autograd.h"
#include "chorale/nn/places.h"

namespace chorale::nn {

// What training changes. A default-constructed one is absent (a layer without bias).
class Parameter : public Tensor {
 public:
  Parameter() { note(); }
  Parameter(const Parameter& other) : Tensor(other) { note(); }
  Parameter(Parameter&& other) noexcept : Tensor(std::move(other)) { note(); }
  Parameter& operator=(const Parameter&) = default;
  Parameter& operator=(Parameter&&) = default;
  ~Parameter() { detail::forget_place(detail::address(this)); }
  // The tensor becomes a leaf that asks for gradients, unless told otherwise; StateError if an op made it.
  explicit Parameter(const Tensor& value, bool with_gradient = true) : Tensor(value) {
    set_requires_grad(*this, with_gradient);
    note();
  }

 private:
  void note() const noexcept { detail::note_place(detail::address(this), detail::PlaceKind::kParameter); }
};

// What belongs to a module's state without being trained: running statistics, tables. Only a persistent one is saved.
class Buffer : public Tensor {
 public:
  Buffer() { note(); }
  Buffer(const Buffer& other) : Tensor(other), persistent_(other.persistent_) { note(); }
  Buffer(Buffer&& other) noexcept : Tensor(std::move(other)), persistent_(other.persistent_) { note(); }
  Buffer& operator=(const Buffer&) = default;
  Buffer& operator=(Buffer&&) = default;
  ~Buffer() { detail::forget_place(detail::address(this)); }
  explicit Buffer(const Tensor& value, bool persistent = true) : Tensor(value), persistent_(persistent) { note(); }
  bool persistent() const { return persistent_; }

 private:
  void note() const noexcept { detail::note_place(detail::address(this), detail::PlaceKind::kBuffer); }

  bool persistent_ = true;
};

}  // namespace chorale::nn
