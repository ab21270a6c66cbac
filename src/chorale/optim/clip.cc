#include "chorale/optim/clip.h"

#include <cmath>

#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/op/update.h"
#include "chorale/optim/gradients.h"
#include "chorale/sharding/sharded.h"

namespace chorale::optim {
namespace {

// The norm, known on every rank, also where gradients are sharded.
Tensor norm_of(std::span<const Tensor> gradients, double norm_type) {
  const Tensor norm = norm_of_all(gradients, norm_type);
  return norm.is_sharded() ? full_tensor(norm) : norm;
}

std::string whose_fault(const GradientList& gradients, double norm_type) {
  for (size_t i = 0; i < gradients.tensors.size(); ++i) {
    if (!std::isfinite(norm_of({&gradients.tensors[i], 1}, norm_type).item<double>()))
      return concat("; the first parameter with a gradient that is not finite is number ", gradients.parameters[i]);
  }
  return ", beyond the largest number";
}

}  // namespace

GradientNorm clip_grad_norm(std::span<const Tensor> parameters, double max_norm, const ClipNormOptions& options) {
  CHORALE_CHECK(max_norm > 0, "[clip_grad_norm] max_norm must be positive, not ", max_norm);
  CHORALE_CHECK(options.norm_type > 0, "[clip_grad_norm] norm_type must be above 0 or infinity, not ",
                options.norm_type);
  const NoGrad quiet;
  const GradientList gradients = gradients_of("clip_grad_norm", parameters);
  const Tensor total = norm_of(gradients.tensors, options.norm_type);
  if (options.error_if_nonfinite) {
    const auto norm = total.item<double>();
    CHORALE_CHECK_STATE(std::isfinite(norm), "[clip_grad_norm] the norm of the gradients is ", norm,
                        whose_fault(gradients, options.norm_type));
  }
  clip_by_norm_(gradients.tensors, total, max_norm);
  return GradientNorm(total);
}

void clip_grad_value(std::span<const Tensor> parameters, double limit) {
  CHORALE_CHECK(limit > 0, "[clip_grad_value] the limit must be positive, not ", limit);
  const NoGrad quiet;
  clip_by_value_(gradients_of("clip_grad_value", parameters).tensors, limit);
}

}  // namespace chorale::optim
