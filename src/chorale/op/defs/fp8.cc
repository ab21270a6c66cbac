#include "chorale/op/fp8.h"

#include "chorale/kernel/cpu/product/fp8_linear.h"
#include "chorale/kernel/fp8.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::Fp8LinearAttrs;

// Of x and of the weight, each four times: cuBLASLt wants a scale to begin at a multiple of 16 bytes.
Shape shape_of_scales() { return {2, 4}; }

void set_spec(OutSpec& out, Shape sizes, DType dtype, Device device) {
  out.sizes = std::move(sizes);
  out.dtype = dtype;
  out.device = device;
}

// All dimensions but the last as one.
int64_t row_count(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dims(); ++d) rows *= x.size(d);
  return rows;
}

void infer_fp8_linear(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &weight = args.in[1], &bias = args.in[2];
  CHORALE_CHECK(weight.dims() == 2 && x.dims() >= 1, "[fp8_linear] needs x [.., in] and a matrix, found ", x.sizes(),
                " and ", weight.sizes());
  const bool in_first = args.attrs.get<Fp8LinearAttrs>().in_first;
  const int64_t in = weight.size(in_first ? 0 : 1), outs = weight.size(in_first ? 1 : 0);
  CHORALE_CHECK(x.size(-1) == in, "[fp8_linear] x ", x.sizes(), " has ", x.size(-1), " features, weight ",
                weight.sizes(), " takes ", in);
  CHORALE_CHECK(x.dtype() == weight.dtype() && (!bias.defined() || bias.dtype() == x.dtype()),
                "[fp8_linear] dtypes differ: x ", x.dtype(), ", weight ", weight.dtype());
  CHORALE_CHECK(!bias.defined() || (bias.dims() == 1 && bias.size(0) == outs), "[fp8_linear] bias ",
                bias.defined() ? bias.sizes() : Shape(), " does not fit weight ", weight.sizes());
  Shape sizes = x.sizes();
  sizes.back() = outs;
  set_spec(out[0], std::move(sizes), x.dtype(), x.device());
  set_spec(out[1], {in, row_count(x)}, DType::kU8, x.device());
  set_spec(out[2], {in, outs}, DType::kU8, x.device());
  set_spec(out[3], shape_of_scales(), DType::kF32, x.device());
}

void infer_fp8_linear_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &x = args.in[1], &weight = args.in[2], &scales = args.in[3];
  CHORALE_CHECK(x.dims() == 2 && weight.dims() == 2 && dy.dims() >= 1 && dy.size(-1) == weight.size(1) &&
                    x.size(0) == weight.size(0) && x.size(1) == row_count(dy),
                "[fp8_linear_backward] dy ", dy.sizes(), ", x ", x.sizes(), " and weight ", weight.sizes(),
                " do not belong together");
  CHORALE_CHECK(x.dtype() == DType::kU8 && weight.dtype() == DType::kU8 && is_floating(scales.dtype()) &&
                    scales.sizes() == shape_of_scales(),
                "[fp8_linear_backward] needs bytes and scales [2, 4], found ", x.dtype(), ", ", weight.dtype(), " and ",
                scales.dtype(), " ", scales.sizes());
  const int64_t in = weight.size(0), outs = weight.size(1);
  Shape sizes = dy.sizes();
  sizes.back() = in;
  set_spec(out[0], std::move(sizes), dy.dtype(), dy.device());
  set_spec(out[1], args.attrs.get<Fp8LinearAttrs>().in_first ? Shape{in, outs} : Shape{outs, in}, dy.dtype(),
           dy.device());
}

Tensors grad_fp8_linear(const GradArgs& g) {
  Tensors din(3);
  const Tensor& dy = g.dout[0];
  if (!dy.defined()) return din;
  if (g.needs(0) || g.needs(1)) {
    const auto made = call_many<2>(kFp8LinearBackward, g.attrs, dy, g.out[1], g.out[2], g.out[3]);
    if (g.needs(0)) din[0] = made[0];
    if (g.needs(1)) din[1] = made[1];
  }
  if (g.needs(2)) din[2] = sum(dy.dims() == 2 ? dy : reshape(dy, {-1, dy.size(-1)}), {0});
  return din;
}

// Eighths, which three bits have: nothing is rounded in any dtype, whichever scale is found.
Tensor eighths(const Shape& sizes, int seed) { return mul(to(sample_ints(sizes, -7, 8, seed), DType::kF64), 0.125); }

}  // namespace

constinit const OpDef kFp8Linear{
    .name = "fp8_linear",
    .inputs = "x, weight, bias?",
    .outputs = 4,
    .attrs = attrs_of<Fp8LinearAttrs>,
    .dtypes = kFloats,
    .infer = infer_fp8_linear,
    .cpu = kernel::cpu::fp8_linear,
    .grad = grad_fp8_linear,
    .twice = false,
    .shard = kReplicateOnly,  // a scale is of the whole
    .saves = {.out = {1, 2, 3}},
    .autocast = Cast::kLower,
    .samples = []() -> std::vector<Sample> {
      // Finite differences see steps.
      return {
          {.in = {eighths({3, 4}, 0), eighths({2, 4}, 1), eighths({2}, 2)}, .attrs = Fp8LinearAttrs{}, .grad = false},
          {.in = {eighths({2, 3, 4}, 3), eighths({4, 5}, 4), eighths({5}, 5)},
           .attrs = Fp8LinearAttrs{true},
           .grad = false},
          {.in = {eighths({6}, 6), eighths({3, 6}, 7), Tensor()}, .attrs = Fp8LinearAttrs{}, .grad = false},
          {.in = {eighths({16, 32}, 8), eighths({32, 48}, 9), Tensor()}, .attrs = Fp8LinearAttrs{true}, .grad = false}};
    },
    .formula = "x weight^T + bias, multiplied in 8 bits",
};

constinit const OpDef kFp8LinearBackward{
    .name = "fp8_linear_backward",
    .inputs = "dy, x, weight, scales",
    .outputs = 2,
    .attrs = attrs_of<Fp8LinearAttrs>,
    .dtypes = kFloats,
    .infer = infer_fp8_linear_backward,
    .cpu = kernel::cpu::fp8_linear_backward,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      const auto bytes = [](const Shape& sizes, int seed) {
        return to(sample_ints(sizes, 0x28, 0x40, seed), DType::kU8);
      };
      const auto scales = [] { return Tensor::from<float>({0.5, 0.5, 0.5, 0.5, 2, 2, 2, 2}, shape_of_scales()); };
      return {{.in = {eighths({3, 2}, 0), bytes({4, 3}, 1), bytes({4, 2}, 2), scales()},
               .attrs = Fp8LinearAttrs{},
               .grad = false},
              {.in = {eighths({2, 3, 5}, 3), bytes({4, 6}, 4), bytes({4, 5}, 5), scales()},
               .attrs = Fp8LinearAttrs{true},
               .grad = false},
              {.in = {eighths({16, 48}, 6), bytes({32, 16}, 7), bytes({32, 48}, 8), scales()},
               .attrs = Fp8LinearAttrs{},
               .grad = false}};
    },
    .formula = "the gradients of x and weight",
};

Rows fp8_rows() {
  static constexpr const OpDef* kRows[] = {&kFp8Linear, &kFp8LinearBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, bool in_first) {
  op::need_defined("fp8_linear", "x", x);
  op::need_defined("fp8_linear", "weight", weight);
  return op::call_many<4>(op::kFp8Linear, kernel::Fp8LinearAttrs{in_first}, x, weight, bias)[0];
}

}  // namespace chorale
