#include "chorale/kernel/cuda/batch_norm.h"

#include <algorithm>

#include "chorale/kernel/cuda/channels.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/image_order.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::cuda {
extern const std::string_view kBatchNormCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kBatchNormCu;

Tensor in_compute(const Tensor& x, DType dtype, Stream stream) {
  return x.defined() ? contiguous(x, compute_of(dtype), stream) : Tensor();
}
void* data_or_nothing(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }

int64_t area_of(const Tensor& x) {
  int64_t area = 1;
  for (int64_t d = 2; d < x.dims(); ++d) area *= x.size(d);
  return area;
}
Grid channel_grid(int64_t channels) {
  return {.x = static_cast<unsigned>(std::clamp<int64_t>(channels, 1, 1 << 20)), .threads = 512};
}
Grid element_grid(const Tensor& x) { return {.x = blocks_for(x.device(), x.elems())}; }

// Whether x is a matrix with one column per channel as it lies.
bool has_columns(const Tensor& x) {
  return (x.dims() == 2 && x.is_contiguous()) || (!x.is_contiguous() && x.is_channels_last());
}
Tensor like_columns(const Tensor& x, const Tensor& of, Stream stream) {
  return x.defined() ? in_image_order(x, !of.is_contiguous(), of.dtype(), stream) : x;
}

// y = relu(batch_norm(x) + other), or parts of it.
void normalize(const KernelArgs& args, const Tensor& other, const Tensor& weight_in, const Tensor& bias_in, bool relu) {
  const Stream stream = args.stream;
  const Tensor& given = args.in[0];
  if (given.elems() == 0) return;
  const DType dtype = given.dtype();
  const int64_t N = given.size(0), C = given.size(1), area = area_of(given);
  const double eps = args.attrs.get<BatchNormAttrs>().eps;
  const Tensor weight = in_compute(weight_in, dtype, stream), bias = in_compute(bias_in, dtype, stream);
  const Tensor &target = args.out[0], &mean = args.out[1], &variance = args.out[2];
  if (has_columns(given) && target.is_channels_last() == given.is_channels_last()) {
    const Tensor more = like_columns(other, given, stream);
    if (reads_columns({&given, &target, &more}, C)) {
      return normalize_columns(given, {N * area, C, mean, variance, weight, bias, eps}, target, stream, relu, more);
    }
  }
  const Tensor x = contiguous(given, stream);
  const DenseResult y(target, x.dtype(), stream);
  launch(instance(stream, kBatchNormCu, "channel_moments", {x.dtype()}), channel_grid(C), stream, x.raw(), mean.raw(),
         variance.raw(), N, C, area);
  launch(instance(stream, kBatchNormCu, "channel_normalize", {x.dtype()}), element_grid(x), stream, x.raw(), mean.raw(),
         variance.raw(), data_or_nothing(weight), data_or_nothing(bias), y.made.raw(), x.elems(), C, area, eps);
  if (relu) {
    const Tensor more = other.defined() ? contiguous(other, dtype, stream) : other;
    launch(instance(stream, kBatchNormCu, "relu_of_sum", {dtype}), element_grid(x), stream, y.made.raw(),
           data_or_nothing(more), x.elems());
  }
  y.store();
}

// Inputs and results of a gradient; `slopes` lie as they like.
struct NormGradients {
  Tensor x, mean, variance, weight, bias, dx, dweight, dbias;
};
void normalize_backward(const KernelArgs& args, const ChannelSlopes& slopes, const NormGradients& of) {
  const Stream stream = args.stream;
  const Tensor& given = of.x;
  if (given.elems() == 0) return;
  const DType dtype = given.dtype();
  const int64_t N = given.size(0), C = given.size(1), area = area_of(given), count = N * area;
  const double eps = args.attrs.get<BatchNormAttrs>().eps;
  const Tensor mean = in_compute(of.mean, dtype, stream), variance = in_compute(of.variance, dtype, stream),
               weight = in_compute(of.weight, dtype, stream), bias = in_compute(of.bias, dtype, stream);
  if (has_columns(given) && of.dx.is_channels_last() == given.is_channels_last()) {
    ChannelSlopes lying = slopes;
    for (Tensor* one : {&lying.dy, &lying.result, &lying.other}) *one = like_columns(*one, given, stream);
    if (slopes.through.defined())
      lying.through = DenseResult(slopes.through, dtype, stream, !given.is_contiguous()).made;
    if (reads_columns({&given, &lying.dy, &lying.result, &lying.other, &lying.through, &of.dx}, C)) {
      normalize_columns_backward(lying, given, {count, C, mean, variance, weight, bias, eps}, of.dx, of.dweight,
                                 of.dbias, stream);
      if (slopes.through.defined() && !lying.through.is(slopes.through))
        copy_into(lying.through, slopes.through, stream);
      return;
    }
  }
  const Tensor x = contiguous(given, stream);
  Tensor dy = contiguous(slopes.dy, stream);
  if (slopes.relu) {
    Tensor result = slopes.result.defined() ? contiguous(slopes.result, stream) : Tensor();
    if (!result.defined()) {  // the ReLU's gradient asks for its result's sign, which is that of what it was given
      result = Tensor::empty(x.sizes(), dtype, x.device());
      launch(instance(stream, kBatchNormCu, "channel_normalize", {dtype}), element_grid(x), stream, x.raw(), mean.raw(),
             variance.raw(), data_or_nothing(weight), data_or_nothing(bias), result.raw(), x.elems(), C, area, eps);
    }
    const Tensor other = slopes.other.defined() ? contiguous(slopes.other, stream) : Tensor(),
                 through = Tensor::empty(x.sizes(), dtype, x.device());
    launch(instance(stream, kBatchNormCu, "through_relu", {dtype}), element_grid(x), stream, dy.raw(),
           data_or_nothing(other), result.raw(), through.raw(), x.elems());
    dy = through;
    if (slopes.through.defined()) copy_into(through, slopes.through, stream);
  }
  const DenseResult dx(of.dx, x.dtype(), stream);
  launch(instance(stream, kBatchNormCu, "channel_sums", {x.dtype()}), channel_grid(C), stream, dy.raw(), x.raw(),
         mean.raw(), variance.raw(), of.dweight.raw(), of.dbias.raw(), N, C, area, eps);
  launch(instance(stream, kBatchNormCu, "channel_backward", {x.dtype()}), element_grid(x), stream, dy.raw(), x.raw(),
         mean.raw(), variance.raw(), data_or_nothing(weight), of.dweight.raw(), of.dbias.raw(), dx.made.raw(),
         x.elems(), count, C, area, eps);
  dx.store();
}

}  // namespace

void batch_norm(const KernelArgs& args) { normalize(args, {}, args.in[1], args.in[2], false); }
void batch_norm_relu(const KernelArgs& args) { normalize(args, args.in[1], args.in[2], args.in[3], true); }

void batch_norm_backward(const KernelArgs& args) {
  normalize_backward(args, {.dy = args.in[0]},
                     {args.in[1], args.in[2], args.in[3], args.in[4], {}, args.out[0], args.out[1], args.out[2]});
}
void batch_norm_relu_backward(const KernelArgs& args) {
  normalize_backward(
      args, {.dy = args.in[0], .relu = true},
      {args.in[1], args.in[2], args.in[3], args.in[4], args.in[5], args.out[0], args.out[1], args.out[2]});
}
void relu_batch_norm_backward(const KernelArgs& args) {
  normalize_backward(
      args, {.dy = args.in[0], .relu = true, .result = args.in[2], .other = args.in[1], .through = args.out[0]},
      {args.in[3], args.in[4], args.in[5], args.in[6], {}, args.out[1], args.out[2], args.out[3]});
}

void running_average(const KernelArgs& args) {
  const auto& a = args.attrs.get<RunningAverageAttrs>();
  const Tensor running = contiguous(args.in[0], args.stream), now = contiguous(args.in[1], args.stream);
  if (running.elems() == 0) return;
  const DenseResult out(args.out[0], running.dtype(), args.stream);
  launch(instance(args.stream, kBatchNormCu, "move_average", {running.dtype(), now.dtype()}), element_grid(running),
         args.stream, running.raw(), now.raw(), out.made.raw(), running.elems(), a.momentum, a.scale);
  out.store();
}

}  // namespace chorale::kernel::cuda
