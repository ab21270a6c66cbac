// Parts of complex numbers. Gradients follow PyTorch's convention: the gradient of a real loss by x + iy is
// dL/dx + i dL/dy.
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

constexpr std::complex<double> kI{0, 1};

std::vector<Sample> samples_complex() { return {{.in = {sample_complex({2, 3})}}, {.in = {sample_complex({}, 1)}}}; }

constexpr OpDef kReal =
    pointwise({ScalarOp::kReal}, {
                                     .name = "real",
                                     .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
                                     .linear = linear_in({0}),
                                     .samples = samples_complex,
                                 });
constexpr OpDef kImag =
    pointwise({ScalarOp::kImag}, {
                                     .name = "imag",
                                     .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], kI)}; },
                                     .linear = linear_in({0}),
                                     .samples = samples_complex,
                                 });
constexpr OpDef kConj =
    pointwise({ScalarOp::kConj}, {
                                     .name = "conj",
                                     .grad = [](const GradArgs& g) -> Tensors { return {conj(g.dout[0])}; },
                                     .linear = linear_in({0}),
                                     .samples = samples_complex,
                                 });
constexpr OpDef kAngle = pointwise({ScalarOp::kAngle, Promotion::kFloat},
                                   {
                                       .name = "angle",
                                       .grad = [](const GradArgs& g) -> Tensors {
                                         const Tensor& z = g.in[0];
                                         if (!is_complex(g.dtype(0))) return zero_gradient(g);
                                         // The unit vector across z, divided by |z|: i z / |z|^2.
                                         return {where(eq(z, 0), 0, mul(div(mul(z, g.dout[0]), square(abs(z))), kI))};
                                       },
                                       .saves = kSavesInputs,
                                       .samples = samples_complex,
                                   });

}  // namespace

constexpr OpDef kComplexAbs = pointwise(
    {ScalarOp::kComplexAbs}, {
                                 .name = "complex_abs",
                                 .grad = [](const GradArgs& g) -> Tensors { return {mul(sign(g.in[0]), g.dout[0])}; },
                                 .saves = kSavesInputs,
                                 .samples = samples_complex,
                             });
constexpr OpDef kComplexSign =
    pointwise({ScalarOp::kSign}, {
                                     .name = "complex_sign",
                                     .dtypes = kComplexes,
                                     .grad = [](const GradArgs& g) -> Tensors {
                                       // What points across z, divided by |z|; what points along z does not change the
                                       // sign.
                                       const Tensor &z = g.in[0], &s = g.out[0], &ds = g.dout[0];
                                       const Tensor along = mul(real(mul(ds, conj(s))), s);
                                       return {where(eq(z, 0), 0, div(sub(ds, along), abs(z)))};
                                     },
                                     .saves = kSavesBoth,
                                     .samples = samples_complex,
                                 });

Rows complex_rows() {
  static constexpr const OpDef* rows[] = {&kReal, &kImag, &kConj, &kAngle, &kComplexAbs, &kComplexSign};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

Tensor real(const Tensor& x) { return is_complex(x.dtype()) ? op::call(op::kReal, {}, x) : x; }
Tensor imag(const Tensor& x) { return op::call(op::kImag, {}, x); }
Tensor conj(const Tensor& x) {
  op::need_defined("conj", "x", x);
  return is_complex(x.dtype()) ? op::call(op::kConj, {}, x) : x;
}
Tensor angle(const Tensor& x) { return op::call(op::kAngle, {}, x); }

}  // namespace chorale
