#include "chorale/op/defs/pointwise_row.h"

#include <algorithm>

#include "chorale/op/creation.h"

namespace chorale::op {
namespace {

void check_numbers_fit(const OpDef& op, const Attrs& attrs, DType common) {
  for (const kernel::Field& field : attrs.type()->fields) {
    if (field.kind != kernel::FieldKind::kScalar) continue;
    const auto number = std::get<Scalar>(attrs.at(field));
    const bool fits = number.kind() <= Scalar::Kind::kInt || is_complex(common) ||
                      (number.kind() == Scalar::Kind::kFloat && is_floating(common));
    CHORALE_CHECK(fits, "[", op.name, "] ", field.name, " = ", number, " does not fit a result of ", common,
                  "; cast a tensor to a wider category first");
  }
}

bool is_same_layout(const Tensor& a, const Tensor& b) {
  for (size_t d = 0; d < a.sizes().size(); ++d) {
    if (a.sizes()[d] > 1 && a.strides()[d] != b.strides()[d]) return false;
  }
  return true;
}

// Results are contiguous, unless all inputs of their shape share one dense layout: that one is kept, so that
// channels-last and transposed tensors flow through and memory is read in order.
void choose_layout(std::span<const Tensor> in, OutSpec& out) {
  // What shows one element at several places does not say how they should lie.
  const auto is_full = [&](const Tensor& x) {
    if (!(x.sizes() == out.sizes)) return false;
    for (int64_t d = 0; d < x.dims(); ++d) {
      if (x.stride(d) == 0 && x.size(d) > 1) return false;
    }
    return true;
  };
  const auto first =
      std::find_if(in.begin(), in.end(), [&](const Tensor& x) { return is_full(x) && !x.is_contiguous(); });
  if (first == in.end() || !is_dense(first->sizes(), first->strides())) return;
  if (!std::all_of(in.begin(), in.end(), [&](const Tensor& x) { return !is_full(x) || is_same_layout(x, *first); }))
    return;
  out.strided = true;
  out.strides = first->strides();
}

}  // namespace

void infer_pointwise(const InferArgs& args, std::span<OutSpec> outs) {
  const kernel::Pointwise& pointwise = *args.op.pointwise;
  OutSpec& out = outs[0];
  const vec::ScalarInfo& info = vec::info(pointwise.op);
  bool all_contiguous = true;
  for (size_t i = 0; i < args.in.size(); ++i) {
    const Tensor& x = args.in[i];
    CHORALE_CHECK(x.defined() && !x.is_sparse(), "[", args.op.name, "] needs dense tensors, but input ", i, " is ",
                  x.defined() ? "sparse" : "undefined");
    all_contiguous &= x.is_contiguous();
    if (i == 0) {
      out.sizes = x.sizes();
    } else if (!(out.sizes == x.sizes())) {
      out.sizes = broadcast_shapes(args.op.name, out.sizes, x.sizes());
    }
  }
  CHORALE_CHECK(info.kind != vec::ScalarKind::kMasked || args.in[0].dtype() == DType::kBool, "[", args.op.name,
                "] the condition must be bool, not ", args.in[0].dtype());
  const DType common = kernel::common_dtype(pointwise, args.in, args.attrs);
  DType loop;
  CHORALE_CHECK(kernel::loop_dtype(pointwise.op, common, loop), "[", args.op.name, "] is not defined for ", common,
                " tensors");
  if (pointwise.promotion == Promotion::kScaled) check_numbers_fit(args.op, args.attrs, common);
  out.dtype = kernel::result_dtype(info.kind, common);
  out.device = args.in[0].device();
  if (!all_contiguous) choose_layout(args.in, out);
}

Tensor zeros_for(const GradArgs& g, size_t input) {
  return g.needs(input) ? zeros(g.shape(input), g.dtype(input), g.dout[0].device()) : Tensor{};
}

Tensors zero_gradient(const GradArgs& g) {
  Tensors gradients;
  for (size_t i = 0; i < g.in.size(); ++i) gradients.push_back(zeros_for(g, i));
  return gradients;
}

std::vector<Sample> samples_unary() {
  return {{.in = {sample({2, 3})}}, {.in = {sample({}, 1)}}, {.in = {sample({2, 1, 5}, 2)}}};
}

std::vector<Sample> samples_holomorphic() {
  std::vector<Sample> samples = samples_unary();
  samples.push_back({.in = {sample_complex({2, 2})}});
  return samples;
}

std::vector<Sample> samples_positive() {
  return {{.in = {sample({2, 3}, 0, 0.25, 3)}}, {.in = {sample({}, 1, 0.25, 3)}}};
}

std::vector<Sample> samples_steps() {
  return {{.in = {Tensor::from({-1.7, -0.3, 0.2, 0.7, 1.3, 2.8}, {2, 3})}}, {.in = {Tensor::from({1.2}, {})}}};
}

std::vector<Sample> samples_binary() {
  return {
      {.in = {sample({2, 3}), sample({2, 3}, 1)}},
      {.in = {sample({2, 3}), sample({3}, 2)}},
      {.in = {sample({4, 1}), sample({2, 1, 3}, 3)}},
      {.in = {sample({2, 2}), sample({}, 4)}},
  };
}

std::vector<Sample> samples_bilinear() {
  std::vector<Sample> samples = samples_binary();
  samples.push_back({.in = {sample_complex({2, 2}), sample_complex({2}, 1)}});
  samples.push_back({.in = {sample({3}), sample_complex({2, 1}, 1)}});  // a real input has a real gradient
  return samples;
}

std::vector<Sample> samples_ternary() {
  return {
      {.in = {sample({2, 3}), sample({2, 3}, 1), sample({2, 3}, 2)}},
      {.in = {sample({2, 1}), sample({3}, 1), sample({}, 2)}},
  };
}

std::vector<Sample> samples_backward() {
  return {{.in = {sample({2, 3}), sample({2, 3}, 1)}}, {.in = {sample({4}, 2), sample({4}, 3)}}};
}

}  // namespace chorale::op
