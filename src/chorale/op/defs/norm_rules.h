// What the rows of normalisations share.
#pragma once

#include "chorale/op/op_def.h"
#include "chorale/op/pointwise.h"

namespace chorale::op {

// The sum of two gradients, either of which may be absent.
inline Tensor plus(const Tensor& a, const Tensor& b) { return !a.defined() ? b : !b.defined() ? a : add(a, b); }

// Throws unless `p` is absent or a floating tensor of this shape.
inline void check_parameter(const InferArgs& args, const char* name, const Tensor& p, const Shape& shape) {
  CHORALE_CHECK(!p.defined() || (p.sizes() == shape && is_floating(p.dtype())), "[", args.op.name, "] ", name,
                " must be a floating tensor of shape ", shape, ", not ", p.dtype(), " ", p.sizes());
}

// Sets an output's shape, with x's device.
inline void describe(OutSpec& out, const Shape& sizes, DType dtype, const Tensor& x) {
  out.sizes = sizes;
  out.dtype = dtype;
  out.device = x.device();
}

// Throws unless the gradient looks like x.
inline void check_gradient(const InferArgs& args, const Tensor& dy, const Tensor& x) {
  CHORALE_CHECK(dy.sizes() == x.sizes() && dy.dtype() == x.dtype(), "[", args.op.name, "] the gradient, ", dy.dtype(),
                " ", dy.sizes(), ", must look like x, ", x.dtype(), " ", x.sizes());
}

// Operands of a normalisation's gradient, for its own gradient. Statistics broadcast to x, the weight too. Writing
//   z = (x - mean) rstd,  g = dy weight,  dx = (g - avg(g) - z avg(g z)) rstd,  dweight = sum(dy z),  dbias = sum(dy)
// with avg over `dims`; without `mean` (root mean square) avg(g) is left out.
struct NormGradient {
  Tensor dy, x, mean, rstd, weight;
  IntList dims;
};
// The gradients of v . dx + v_weight . dweight + v_bias . dbias with respect to the tensors of NormGradient. v_weight
// and v_bias broadcast to x; any of the three may be absent.
NormGradient differentiate(const NormGradient& of, const Tensor& v, const Tensor& v_weight, const Tensor& v_bias);

}  // namespace chorale::op
