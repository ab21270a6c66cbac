#include "chorale/op/product.h"

#include "chorale/kernel/cpu/product/matmul.h"
#include "chorale/kernel/linalg_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/padded_rows.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

using kernel::AddmmAttrs;

void check_dtypes(const char* name, const Tensor& a, const Tensor& b) {
  CHORALE_CHECK(a.dtype() == b.dtype(), "[", name, "] dtypes differ: ", a.dtype(), " and ", b.dtype(),
                "; cast one side");
}

void infer_matmul(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &a = args.in[0], &b = args.in[1];
  CHORALE_CHECK(a.dims() >= 2 && b.dims() >= 2, "[matmul] needs matrices, found ", a.sizes(), " x ", b.sizes());
  check_dtypes("matmul", a, b);
  CHORALE_CHECK(a.size(-1) == b.size(-2), "[matmul] inner dimensions differ: ", a.sizes(), " x ", b.sizes(),
                "; transpose one side?");
  Shape sizes;
  if (a.dims() > 2 || b.dims() > 2) {
    sizes = broadcast_shapes("matmul", Shape(a.sizes().begin(), a.sizes().end() - 2),
                             Shape(b.sizes().begin(), b.sizes().end() - 2));
  }
  sizes.push_back(a.size(-2));
  sizes.push_back(b.size(-1));
  out[0].sizes = std::move(sizes);
  out[0].dtype = a.dtype();
  out[0].device = a.device();
}

void infer_addmm(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &c = args.in[0], &a = args.in[1], &b = args.in[2];
  CHORALE_CHECK(a.dims() == 2 && b.dims() == 2, "[addmm] needs matrices, found ", a.sizes(), " x ", b.sizes());
  check_dtypes("addmm", a, b);
  check_dtypes("addmm", c, a);
  CHORALE_CHECK(a.size(1) == b.size(0), "[addmm] inner dimensions differ: ", a.sizes(), " x ", b.sizes(),
                "; transpose one side?");
  const Shape sizes{a.size(0), b.size(1)};
  CHORALE_CHECK(c.dims() <= 2 && broadcast_shapes("addmm", c.sizes(), sizes) == sizes, "[addmm] ", c.sizes(),
                " does not broadcast to the product's ", sizes);
  out[0].sizes = sizes;
  out[0].dtype = a.dtype();
  out[0].device = a.device();
}

void infer_linear(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &weight = args.in[1], &bias = args.in[2];
  CHORALE_CHECK(weight.dims() == 2 && x.dims() >= 1, "[linear] needs x [.., in] and weight [out, in], found ",
                x.sizes(), " and ", weight.sizes());
  CHORALE_CHECK(x.size(-1) == weight.size(1), "[linear] x ", x.sizes(), " has ", x.size(-1), " features, weight ",
                weight.sizes(), " takes ", weight.size(1));
  check_dtypes("linear", x, weight);
  if (bias.defined()) {
    check_dtypes("linear", x, bias);
    CHORALE_CHECK(bias.dims() == 1 && bias.size(0) == weight.size(0), "[linear] bias ", bias.sizes(),
                  " does not fit weight ", weight.sizes());
  }
  out[0].sizes = x.sizes();
  out[0].sizes.back() = weight.size(0);
  out[0].dtype = x.dtype();
  out[0].device = x.device();
  if (wants_padded_rows(out[0])) pad_rows(out[0]);
}

// All dimensions but the last as one.
Tensor as_rows(const Tensor& x) { return x.dims() == 2 ? x : reshape(x, {-1, x.size(-1)}); }

Tensors grad_linear(const GradArgs& g) {
  const Tensor &x = g.in[0], &weight = g.in[1], &dy = g.dout[0];
  const Tensor rows = as_rows(dy);
  Tensors din(3);
  const auto conjugated = [](const Tensor& t) { return is_complex(t.dtype()) ? conj(t) : t; };
  if (g.needs(0)) din[0] = reshape(matmul(rows, conjugated(weight)), x.sizes());
  if (g.needs(1)) din[1] = emit(g, 1, kMatmul, {}, transpose(rows, 0, 1), conjugated(as_rows(x)));
  if (g.needs(2)) din[2] = sum(rows, {0});
  return din;
}

}  // namespace

constexpr OpDef kMatmul{
    .name = "matmul",
    .inputs = "a, b",
    .dtypes = kFloats | kInts | kComplexes,
    .infer = infer_matmul,
    .cpu = kernel::cpu::matmul,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &a = g.in[0], &b = g.in[1], &dc = g.dout[0];
      Tensors din(2);
      if (g.needs(0)) din[0] = a.dims() == dc.dims() ? emit(g, 0, kMatmul, {}, dc, adjoint(b)) : matmul(dc, adjoint(b));
      if (g.needs(1)) din[1] = b.dims() == dc.dims() ? emit(g, 1, kMatmul, {}, adjoint(a), dc) : matmul(adjoint(a), dc);
      return din;
    },
    .shard = {.labels = "...mk,...kn->...mn", .partial = Reduce::kSum},
    .linear = linear_in({0, 1}),
    .saves = kSavesInputs,
    .autocast = Cast::kLower,
    .samples =
        [] {
          return std::vector<Sample>{{.in = {sample({3, 4}), sample({4, 2}, 1)}},
                                     {.in = {sample({2, 3, 4}), sample({2, 4, 5}, 1)}},
                                     {.in = {sample({2, 1, 3, 2}), sample({4, 2, 3}, 1)}},
                                     {.in = {sample_complex({2, 3}), sample_complex({3, 2}, 1)}}};
        },
    .formula = "c[i][j] = sum over k of a[i][k] b[k][j]",
};

// x by a number, which is mostly 1: a pass over x less.
Tensor times(const Tensor& x, Scalar by) { return by.real() == 1 && by.imag() == 0 ? x : mul(x, by); }

constexpr OpDef kAddmm{
    .name = "addmm",
    .inputs = "c, a, b",
    .attrs = attrs_of<AddmmAttrs>,
    .dtypes = kFloats | kInts,
    .infer = infer_addmm,
    .cpu = kernel::cpu::addmm,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& attrs = g.attrs.get<AddmmAttrs>();
      const Tensor& dy = g.dout[0];
      Tensors din(3);
      if (g.needs(0)) din[0] = times(dy, attrs.beta);
      if (g.needs(1)) din[1] = times(matmul(dy, adjoint(g.in[2])), attrs.alpha);
      if (g.needs(2)) din[2] = times(matmul(adjoint(g.in[1]), dy), attrs.alpha);
      return din;
    },
    // c is a term of its own, and may be repeated along m and n.
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    ways.split(join({"+" + std::string("mn").substr(static_cast<size_t>(2 - call.dims(0))), "mk", "kn"},
                                    {"mn"}),
                               Reduce::kSum);
                  }},
    .linear = linear_terms({{0}, {1, 2}}),
    .saves = saves_in({1, 2}),
    .autocast = Cast::kLower,
    .samples =
        [] {
          return std::vector<Sample>{
              {.in = {sample({3, 2}), sample({3, 4}, 1), sample({4, 2}, 2)}, .attrs = AddmmAttrs{}},
              {.in = {sample({2}), sample({3, 4}, 1), sample({4, 2}, 2)}, .attrs = AddmmAttrs{0.5, -2.0}},
              {.in = {sample({3, 1}), sample({3, 4}, 1), sample({4, 2}, 2)}, .attrs = AddmmAttrs{0, 3}}};
        },
    .formula = "beta c + alpha a b",
};

constexpr OpDef kLinear{
    .name = "linear",
    .inputs = "x, weight, bias?",
    .dtypes = kFloats | kComplexes,
    .infer = infer_linear,
    .cpu = kernel::cpu::linear,
    .grad = grad_linear,
    // Features may be split: the bias is then a partial sum too, or every rank would add all of it.
    .shard = {.labels = "...k,nk,+n->...n", .partial = Reduce::kSum},
    .linear = linear_terms({{0, 1}, {2}}),
    .saves = saves_in({0, 1}),
    .autocast = Cast::kLower,
    .samples =
        [] {
          return std::vector<Sample>{
              {.in = {sample({3, 4}), sample({2, 4}, 1), sample({2}, 2)}},
              {.in = {sample({2, 3, 4}), sample({5, 4}, 1), sample({5}, 2)}},
              {.in = {sample({4}), sample({3, 4}, 1), Tensor()}},
              {.in = {sample_complex({3, 2}), sample_complex({4, 2}, 1), sample_complex({4}, 2)}}};
        },
    .formula = "x weight^T + bias",
};

namespace {
constexpr const OpDef* kProductRows[] = {&kMatmul, &kAddmm, &kLinear};
}
Rows product_rows() { return kProductRows; }

}  // namespace op

Tensor matmul(const Tensor& a, const Tensor& b) {
  op::need_defined("matmul", "a", a);
  op::need_defined("matmul", "b", b);
  CHORALE_CHECK(a.dims() >= 1 && b.dims() >= 1, "[matmul] a scalar is no matrix: ", a.sizes(), " x ", b.sizes(),
                "; use mul");
  if (a.dims() == 1) return squeeze(matmul(unsqueeze(a, 0), b), {b.dims() == 1 ? int64_t{0} : int64_t{-2}});
  if (b.dims() == 1) return squeeze(matmul(a, unsqueeze(b, 1)), {-1});
  // Many small matrices times one matrix are one tall matrix times it, in the gradient too.
  if (a.dims() > 2 && b.dims() == 2 && a.is_contiguous() && a.elems() > 0) {
    Shape sizes = a.sizes();
    sizes.back() = b.size(1);
    return view(op::call(op::kMatmul, {}, view(a, {-1, a.size(-1)}), b), sizes);
  }
  return op::call(op::kMatmul, {}, a, b);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  op::need_defined("mm", "a", a);
  op::need_defined("mm", "b", b);
  CHORALE_CHECK(a.dims() == 2 && b.dims() == 2, "[mm] needs two matrices, found ", a.sizes(), " x ", b.sizes());
  return op::call(op::kMatmul, {}, a, b);
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  op::need_defined("bmm", "a", a);
  op::need_defined("bmm", "b", b);
  CHORALE_CHECK(a.dims() == 3 && b.dims() == 3 && a.size(0) == b.size(0),
                "[bmm] needs two batches of matrices of equal length, found ", a.sizes(), " x ", b.sizes());
  return op::call(op::kMatmul, {}, a, b);
}

Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, Scalar beta, Scalar alpha) {
  if (a.defined() && is_complex(a.dtype())) {
    const Tensor product = mul(mm(a, b), alpha);
    return beta.is_zero() ? product : add(mul(c, beta), product);
  }
  return op::call(op::kAddmm, op::AddmmAttrs{beta, alpha}, c, a, b);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return op::call(op::kLinear, {}, x, weight, bias);
}

Tensor dot(const Tensor& a, const Tensor& b) {
  op::need_defined("dot", "a", a);
  op::need_defined("dot", "b", b);
  CHORALE_CHECK(a.dims() == 1 && b.dims() == 1 && a.size(0) == b.size(0),
                "[dot] needs two vectors of equal length, found ", a.sizes(), " and ", b.sizes());
  return matmul(a, b);
}

Tensor outer(const Tensor& a, const Tensor& b) {
  op::need_defined("outer", "a", a);
  op::need_defined("outer", "b", b);
  CHORALE_CHECK(a.dims() == 1 && b.dims() == 1, "[outer] needs two vectors, found ", a.sizes(), " and ", b.sizes());
  return mul(unsqueeze(a, 1), b);
}

}  // namespace chorale
