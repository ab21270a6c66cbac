#include "chorale/kernel/cuda/loss.h"

#include <algorithm>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::cuda {
extern const std::string_view kLossCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kLossCu;

// What kernels see (loss.cu).
struct Groups {
  int64_t rows, groups, each, area;
};
Groups groups_of(const Tensor& x, int64_t groups) {
  int64_t area = 1;
  for (int64_t d = 2; d < x.dims(); ++d) area *= x.size(d);
  return {x.size(0) * groups, groups, x.size(1) / groups, area};
}
Grid group_grid(int64_t rows) { return {.x = static_cast<unsigned>(std::clamp<int64_t>(rows, 1, 1 << 20))}; }

std::string kind_in_text(const DifferenceLossAttrs& a) { return concat(static_cast<int>(a.kind)); }
double divisor_of(const DifferenceLossAttrs& a, int64_t n) {
  if (a.reduction != Reduction::kMean) return 1;
  return static_cast<double>(a.count > 0 ? a.count : n);
}
Tensor vector_or_none(const Tensor& x, DType dtype, Stream stream) {
  return x.defined() ? contiguous(x, compute_of(dtype), stream) : Tensor();
}
void* begin_or_null(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }

}  // namespace

void difference_loss(const KernelArgs& args) {
  const auto& a = args.attrs.get<DifferenceLossAttrs>();
  const Stream stream = args.stream;
  const Tensor x = contiguous(args.in[0], stream), y = contiguous(args.in[1], x.dtype(), stream);
  const Tensor& out = args.out[0];
  const int64_t n = x.elems();
  const std::string kind = kind_in_text(a);
  if (a.reduction == Reduction::kNone) {
    if (n == 0) return;
    launch(instance(stream, kLossCu, "difference_each", {x.dtype()}, kind.c_str()), {.x = blocks_for(stream.device, n)},
           stream, x.raw(), y.raw(), out.raw(), n, a.bound);
    return;
  }
  const int64_t blocks = std::clamp<int64_t>((n + 2047) / 2048, 1, 1024);
  const Tensor sums = Tensor::empty({blocks}, compute_of(x.dtype()), stream.device);
  launch(instance(stream, kLossCu, "difference_sums", {x.dtype()}, kind.c_str()), {.x = static_cast<unsigned>(blocks)},
         stream, x.raw(), y.raw(), sums.raw(), n, a.bound);
  launch(instance(stream, kLossCu, "total_of_sums", {x.dtype()}), {.threads = 1024}, stream, sums.raw(), out.raw(),
         blocks, divisor_of(a, n));
}

void difference_loss_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<DifferenceLossAttrs>();
  const Stream stream = args.stream;
  const Tensor x = contiguous(args.in[1], stream), y = contiguous(args.in[2], x.dtype(), stream);
  const int64_t n = x.elems();
  if (n == 0) return;
  const Tensor dloss = contiguous(args.in[0], compute_of(x.dtype()), stream);
  launch(instance(stream, kLossCu, "difference_backward", {x.dtype()}, kind_in_text(a).c_str()),
         {.x = blocks_for(stream.device, n)}, stream, dloss.raw(), x.raw(), y.raw(), args.out[0].raw(), n, a.bound,
         divisor_of(a, n), int64_t{a.reduction == Reduction::kNone});
}

void binary_cross_entropy(const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor x = contiguous(args.in[0], stream), target = contiguous(args.in[1], x.dtype(), stream);
  if (x.elems() == 0) return;
  launch(instance(stream, kLossCu, "binary_cross_entropy", {x.dtype()}), {.x = blocks_for(stream.device, x.elems())},
         stream, x.raw(), target.raw(), args.out[0].raw(), x.elems(), fault_of(stream.device), row_number(args));
}

void group_norm(const KernelArgs& args) {
  const auto& a = args.attrs.get<GroupNormAttrs>();
  const Stream stream = args.stream;
  const Tensor x = contiguous(args.in[0], stream);
  if (x.elems() == 0) return;
  const Groups g = groups_of(x, a.groups);
  const Tensor weight = vector_or_none(args.in[1], x.dtype(), stream),
               bias = vector_or_none(args.in[2], x.dtype(), stream);
  launch(instance(stream, kLossCu, "group_norm", {x.dtype()}), group_grid(g.rows), stream, x.raw(),
         begin_or_null(weight), begin_or_null(bias), args.out[0].raw(), args.out[1].raw(), args.out[2].raw(), g, a.eps);
}

void group_norm_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<GroupNormBackwardAttrs>();
  const Stream stream = args.stream;
  const Tensor dy = contiguous(args.in[0], stream), x = contiguous(args.in[1], stream);
  const DType dtype = x.dtype(), compute = compute_of(dtype);
  const Groups g = groups_of(x, a.groups);
  const Tensor mean = vector_or_none(args.in[2], dtype, stream), rstd = vector_or_none(args.in[3], dtype, stream),
               weight = vector_or_none(args.in[4], dtype, stream);
  const Tensor sums = Tensor::empty({std::max<int64_t>(1, 2 * g.rows * g.each)}, compute, stream.device);
  if (x.elems() > 0) {
    launch(instance(stream, kLossCu, "group_norm_sums", {dtype}), group_grid(g.rows * g.each), stream, dy.raw(),
           x.raw(), mean.raw(), rstd.raw(), sums.raw(), g);
    launch(instance(stream, kLossCu, "group_norm_backward", {dtype}), group_grid(g.rows), stream, dy.raw(), x.raw(),
           mean.raw(), rstd.raw(), begin_or_null(weight), sums.raw(), args.out[0].raw(), g);
  }
  if (!a.affine) return;
  const int64_t channels = x.size(1), samples = x.elems() > 0 ? x.size(0) : 0;
  if (channels == 0) return;
  launch(instance(stream, kLossCu, "group_norm_totals", {compute}), {.x = blocks_for(stream.device, channels)}, stream,
         sums.raw(), args.out[1].raw(), args.out[2].raw(), samples, channels);
}

}  // namespace chorale::kernel::cuda
