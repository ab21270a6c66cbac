#include "chorale/kernel/cpu/gradient_list.h"

#include <atomic>
#include <cmath>

#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/update_lists.h"
#include "chorale/kernel/update_attrs.h"
#include "chorale/vec/loops.h"
#include "chorale/vec/update.h"

namespace chorale::kernel::cpu {
namespace {

void* at(const Tensor& x, int64_t elems) {
  return static_cast<std::byte*>(x.raw()) + elems * static_cast<int64_t>(x.elem_bytes());
}

double reduced(vec::ReduceOp op, DType dtype, const void* x, int64_t n) {
  alignas(16) std::byte accumulator[16];
  vec::reduce_identity(op, dtype, accumulator);
  vec::reduce_row(op, dtype)(x, n, accumulator);
  if (dtype == DType::kF64) return *reinterpret_cast<const double*>(accumulator);
  return static_cast<double>(*reinterpret_cast<const float*>(accumulator));
}

// Powers other than 1, 2 and infinity are rare: one call per element.
template <class T>
double sum_of_powers(const void* x, int64_t n, double p) {
  using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;
  double sum = 0;
  for (const T& value : std::span(static_cast<const T*>(x), static_cast<size_t>(n)))
    sum += std::pow(std::abs(static_cast<double>(static_cast<Number>(value))), p);
  return sum;
}

double sum_of_powers(DType dtype, const void* x, int64_t n, double p) {
  if (p == 1) return reduced(vec::ReduceOp::kSumAbs, dtype, x, n);
  if (p == 2) return reduced(vec::ReduceOp::kSumSquares, dtype, x, n);
  switch (dtype) {
    case DType::kF64:
      return sum_of_powers<double>(x, n, p);
    case DType::kF16:
      return sum_of_powers<float16>(x, n, p);
    case DType::kBF16:
      return sum_of_powers<bfloat16>(x, n, p);
    default:
      return sum_of_powers<float>(x, n, p);
  }
}

}  // namespace

void power_sums(const KernelArgs& args) {
  const double p = args.attrs.get<PowerAttrs>().p;
  std::vector<Tensor> dense;
  dense.reserve(args.in.size());
  for (const Tensor& x : args.in) dense.push_back(is_dense(x.sizes(), x.strides()) ? x : contiguous(x));
  const std::vector<Piece> pieces = pieces_of(dense);
  std::vector<double> parts(pieces.size());
  for_each_piece(pieces, [&](const Piece& s, size_t i) {
    const Tensor& x = dense[s.tensor];
    parts[i] = std::isinf(p) ? reduced(vec::ReduceOp::kMaxAbs, x.dtype(), at(x, s.begin), s.n)
                             : sum_of_powers(x.dtype(), at(x, s.begin), s.n, p);
  });
  for (const Tensor& y : args.out) *y.data<double>() = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    double& sum = *args.out[pieces[i].tensor].data<double>();
    if (!std::isinf(p)) {
      sum += parts[i];
    } else if (parts[i] > sum || std::isnan(parts[i])) {
      sum = parts[i];
    }
  }
}

void clip_by_norm(const KernelArgs& args) {
  start_from(args.in.subspan(1), args.out);
  const double norm = number_in(args.in[0]), factor = args.attrs.get<ClipNormAttrs>().max_norm / (norm + 1e-6);
  if (!std::isfinite(norm) || factor >= 1) return;
  for_each_piece(pieces_of(args.out), [&](const Piece& s, size_t) {
    const Tensor& x = args.out[s.tensor];
    vec::scale_checked_loop(x.dtype())(at(x, s.begin), s.n, factor);
  });
}

void clip_by_value(const KernelArgs& args) {
  start_from(args.in, args.out);
  const double limit = args.attrs.get<ClipValueAttrs>().limit;
  vec::Params params;
  params.f[0] = -limit;
  params.f[1] = limit;
  for_each_piece(pieces_of(args.out), [&](const Piece& s, size_t) {
    const Tensor& x = args.out[s.tensor];
    const void* in[1] = {at(x, s.begin)};
    vec::pointwise_loop(vec::ScalarOp::kClamp, x.dtype())(in, at(x, s.begin), s.n, params);
  });
}

void unscale(const KernelArgs& args) {
  const auto list = args.out.subspan(1);
  start_from(args.in.subspan(1), args.out);
  std::atomic<bool> finite = true;
  for_each_piece(pieces_of(list), [&, factor = 1 / number_in(args.in[0])](const Piece& s, size_t) {
    const Tensor& x = list[s.tensor];
    if (!vec::scale_checked_loop(x.dtype())(at(x, s.begin), s.n, factor))
      finite.store(false, std::memory_order_relaxed);
  });
  if (!finite) *args.out[0].data<float>() = 1;
}

void next_loss_scale(const KernelArgs& args) {
  const auto& rule = args.attrs.get<LossScaleAttrs>();
  const bool found = number_in(args.in[2]) != 0;
  auto scale = static_cast<float>(number_in(args.in[0]));
  int64_t steps = found ? 0 : *args.in[1].data<int64_t>() + 1;
  if (found) {
    scale = static_cast<float>(scale * rule.backoff);
  } else if (steps == rule.interval) {
    // It may only grow as far as f32, in which it multiplies the loss, can hold it.
    const auto grown = static_cast<float>(scale * rule.growth);
    if (std::isfinite(grown)) scale = grown;
    steps = 0;
  }
  *args.out[0].data<float>() = scale;
  *args.out[1].data<int64_t>() = steps;
}

}  // namespace chorale::kernel::cpu
