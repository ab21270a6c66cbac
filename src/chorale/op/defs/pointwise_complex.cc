// Parts of complex numbers. Gradients follow PyTorch's convention: the gradient of a real loss by z is dL/dx + i dL/dy.
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

std::vector<Sample> samples_complex() { return {{.in = {sample_complex({2, 3})}}, {.in = {sample_complex({}, 1)}}}; }

constexpr OpDef kReal = pointwise<ScalarOp::kReal>({
    .name = "real",
    .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
    .linear = linear_in({0}),
    .samples = samples_complex,
});

constexpr OpDef kConj = pointwise<ScalarOp::kConj>({
    .name = "conj",
    .grad = [](const GradArgs& g) -> Tensors { return {conj(g.dout[0])}; },
    .linear = linear_in({0}),
    .samples = samples_complex,
});

}  // namespace

Rows complex_rows() {
  static constexpr const OpDef* rows[] = {&kReal, &kConj};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

Tensor real(const Tensor& x) { return is_complex(x.dtype()) ? op::call(op::kReal, {}, x) : x; }

Tensor conj(const Tensor& x) { return is_complex(x.dtype()) ? op::call(op::kConj, {}, x) : x; }

}  // namespace chorale
