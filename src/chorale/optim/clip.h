// Clipping gradients between backward and step.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>

#include "chorale/tensor/tensor.h"

namespace chorale::optim {

struct ClipNormOptions {
  double norm_type = 2;  // above 0, or infinity
  bool error_if_nonfinite = false;
};
// The norm that was found. It becomes a number where it is used as one: then the host waits for it. A step that is
// compiled or replayed does not, so there it stays a tensor.
class GradientNorm {
 public:
  explicit GradientNorm(Tensor norm) : norm_(std::move(norm)) {}
  operator double() const { return norm_.item<double>(); }  // NOLINT(google-explicit-constructor)
  const Tensor& tensor() const { return norm_; }            // f64, without dimensions

 private:
  Tensor norm_;
};

// Returns the norm of all gradients taken together, and scales them in place by max_norm / (norm + 1e-6) where that is
// below 1. A norm that is infinite or NaN is returned and leaves the gradients as they are, or is a StateError that
// names the first parameter to blame. StateError also when there are no gradients.
GradientNorm clip_grad_norm(std::span<const Tensor> parameters, double max_norm, const ClipNormOptions& options = {});
inline GradientNorm clip_grad_norm(std::initializer_list<Tensor> parameters, double max_norm,
                                   const ClipNormOptions& options = {}) {
  return clip_grad_norm(std::span(parameters.begin(), parameters.size()), max_norm, options);
}

// Limits every element of every gradient to [-limit, limit], in place.
void clip_grad_value(std::span<const Tensor> parameters, double limit);
inline void clip_grad_value(std::initializer_list<Tensor> parameters, double limit) {
  clip_grad_value(std::span(parameters.begin(), parameters.size()), limit);
}

}  // namespace chorale::optim
