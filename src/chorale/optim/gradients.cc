#include "chorale/optim/gradients.h"

#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/op/sparse.h"
#include "chorale/sharding/sharded.h"

namespace chorale::optim {
namespace {

// Memory without holes that holds the gradient of x, and stays its gradient.
Tensor flat_gradient(const Tensor& x) {
  const NoGrad quiet;
  Tensor gradient = chorale::gradient(x);
  if (!gradient.defined()) return {};
  if (gradient.is_sparse()) {
    const Tensor sorted = coalesce(gradient);
    const Tensor values = contiguous(sorted.sparse().values);
    set_gradient(x, Tensor::sparse_coo(sorted.sparse().indices, values, gradient.sizes(), true));
    return values;
  }
  // Partial sums have no norm: they are reduced here, once, and the update need not do it again.
  if (gradient.is_sharded() && x.is_sharded() && placements_of(gradient) != placements_of(x)) {
    gradient = redistribute(gradient, placements_of(x));
    set_gradient(x, gradient);
  }
  if (gradient.is_sharded() || is_dense(gradient.sizes(), gradient.strides())) return gradient;
  gradient = contiguous(gradient);
  set_gradient(x, gradient);
  return gradient;
}

}  // namespace

GradientList gradients_of(const char* caller, std::span<const Tensor> parameters) {
  GradientList list;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const Tensor gradient = flat_gradient(parameters[p]);
    if (!gradient.defined()) continue;
    CHORALE_CHECK(is_floating(gradient.dtype()), "[", caller, "] the gradient of parameter ", p, " is ",
                  gradient.dtype(), "; expected f16, bf16, f32 or f64");
    list.tensors.push_back(gradient);
    list.parameters.push_back(p);
  }
  CHORALE_CHECK_STATE(!list.tensors.empty(), "[", caller,
                      "] no parameter has a gradient: call backward first; an optimizer that updates in backward "
                      "leaves none and cannot be combined with this");
  return list;
}

}  // namespace chorale::optim
