#include "chorale/kernel/cuda/image.h"

#include <algorithm>

#include "chorale/kernel/cuda/channels.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/pool_window.h"

namespace chorale::cuda {
extern const std::string_view kImageCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kImageCu;

// As kernels see them (image.cu).
struct Side {
  int64_t kernel = 0, stride = 1, padding = 0, dilation = 1;
  int64_t size = 0, outputs = 0;
};
struct Pool {
  int64_t samples = 0, channels = 0, last = 0;
  Side h, w;
  int64_t include_padding = 1, fixed = 0;
};

struct PoolStrides {
  int64_t h, w;
};

// Images lie in row-major order, or with their channels last.
bool lies_in(bool last, const Tensor& x) { return last ? x.is_channels_last() : x.is_contiguous(); }
Strides strides_in(bool last, const Shape& sizes) {
  return last ? channels_last_strides(sizes) : contiguous_strides(sizes);
}
Tensor in_image_order(const Tensor& x, bool last, DType dtype, Stream stream) {
  if (lies_in(last, x) && x.dtype() == dtype) return x;
  Tensor copy = Tensor::empty_strided(x.sizes(), strides_in(last, x.sizes()), dtype, x.device());
  copy_into(x, copy, stream);
  return copy;
}
// The order of all operands. A result of one place per channel has both orders at once, and the input decides.
bool has_channels_last(const KernelArgs& args) {
  const Tensor &in = args.in[0], &out = args.out[0];
  if (in.dims() != 4) return false;
  return !out.is_contiguous() ? out.is_channels_last()
                              : out.is_channels_last() && in.is_channels_last() && !in.is_contiguous();
}

// A result that kernels write in one of the orders, and that is copied to where it belongs if it lies otherwise.
struct DenseResult {
  DenseResult(const Tensor& to, DType dtype, Stream its_stream, bool last = false)
      : target(to),
        made(lies_in(last, to) && to.dtype() == dtype
                 ? to
                 : Tensor::empty_strided(to.sizes(), strides_in(last, to.sizes()), dtype, to.device())),
        stream(its_stream) {}
  void store() const {
    if (!made.is(target)) copy_into(made, target, stream);
  }
  Tensor target, made;
  Stream stream;
};

Tensor in_compute(const Tensor& x, DType dtype, Stream stream) {
  return x.defined() ? contiguous(x, compute_of(dtype), stream) : Tensor();
}
void* place_or_null(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }

int64_t area_of(const Tensor& x) {
  int64_t area = 1;
  for (int64_t d = 2; d < x.dims(); ++d) area *= x.size(d);
  return area;
}
Grid channel_grid(int64_t channels) {
  return {.x = static_cast<unsigned>(std::clamp<int64_t>(channels, 1, 1 << 20)), .threads = 512};
}

Side side_of(const PoolSide* window, int64_t size, int64_t outputs) {
  if (!window) return {0, 1, 0, 1, size, outputs};
  return {window->kernel, window->stride, window->padding, window->dilation, size, outputs};
}
// `large` is pooled to `small`; without a window adaptively.
Pool pool_of(const Tensor& large, const Tensor& small, const PoolWindow* window, bool last) {
  Pool p;
  p.samples = large.size(0);
  p.channels = large.size(1);
  p.last = last ? 1 : 0;
  p.h = side_of(window ? &window->height : nullptr, large.size(2), small.size(2));
  p.w = side_of(window ? &window->width : nullptr, large.size(3), small.size(3));
  return p;
}

void pool_to_largest(const KernelArgs& args, const PoolWindow* window) {
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor x = in_image_order(args.in[0], last, args.in[0].dtype(), args.stream);
  const DenseResult y(args.out[0], x.dtype(), args.stream, last), indices(args.out[1], DType::kI64, args.stream, last);
  launch(instance(args.stream, kImageCu, "pool_largest", {x.dtype()}),
         {.x = blocks_for(args.stream.device, y.made.elems())}, args.stream, x.raw(), y.made.raw(), indices.made.raw(),
         pool_of(x, y.made, window, last));
  y.store();
  indices.store();
}
void pool_to_mean(const KernelArgs& args, const PoolWindow* window, bool include_padding, int64_t fixed) {
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor x = in_image_order(args.in[0], last, args.in[0].dtype(), args.stream);
  const DenseResult y(args.out[0], x.dtype(), args.stream, last);
  Pool p = pool_of(x, y.made, window, last);
  p.include_padding = include_padding ? 1 : 0;
  p.fixed = fixed;
  launch(instance(args.stream, kImageCu, "pool_mean", {x.dtype()}),
         {.x = blocks_for(args.stream.device, y.made.elems())}, args.stream, x.raw(), y.made.raw(), p);
  y.store();
}
void pool_to_mean_backward(const KernelArgs& args, const PoolWindow* window, bool include_padding, int64_t fixed) {
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor dy = in_image_order(args.in[0], last, args.in[0].dtype(), args.stream);
  const DenseResult dx(args.out[0], dy.dtype(), args.stream, last);
  Pool p = pool_of(dx.made, dy, window, last);
  p.include_padding = include_padding ? 1 : 0;
  p.fixed = fixed;
  launch(instance(args.stream, kImageCu, "pool_mean_backward", {dy.dtype()}),
         {.x = blocks_for(args.stream.device, dx.made.elems())}, args.stream, dy.raw(), dx.made.raw(), p);
  dx.store();
}

// Whether x is a matrix with one column per channel as it lies.
bool has_columns(const Tensor& x) {
  return (x.dims() == 2 && x.is_contiguous()) || (!x.is_contiguous() && x.is_channels_last());
}

}  // namespace

void batch_norm(const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor& given = args.in[0];
  if (given.elems() == 0) return;
  const DType dtype = given.dtype();
  const int64_t N = given.size(0), C = given.size(1), area = area_of(given);
  const double eps = args.attrs.get<BatchNormAttrs>().eps;
  const Tensor weight = in_compute(args.in[1], dtype, stream), bias = in_compute(args.in[2], dtype, stream);
  if (has_columns(given) && args.out[0].is_channels_last() == given.is_channels_last() &&
      reads_columns({&given, &args.out[0]}, C)) {
    return normalize_columns(given, {N * area, C, args.out[1], args.out[2], weight, bias, eps}, args.out[0], stream);
  }
  const Tensor x = contiguous(given, stream);
  const DenseResult y(args.out[0], x.dtype(), stream);
  launch(instance(stream, kImageCu, "channel_moments", {x.dtype()}), channel_grid(C), stream, x.raw(),
         args.out[1].raw(), args.out[2].raw(), N, C, area);
  launch(instance(stream, kImageCu, "channel_normalize", {x.dtype()}), {.x = blocks_for(stream.device, x.elems())},
         stream, x.raw(), args.out[1].raw(), args.out[2].raw(), place_or_null(weight), place_or_null(bias),
         y.made.raw(), x.elems(), C, area, eps);
  y.store();
}

void batch_norm_backward(const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor& given = args.in[1];
  if (given.elems() == 0) return;
  const DType dtype = given.dtype();
  const int64_t N = given.size(0), C = given.size(1), area = area_of(given), count = N * area;
  const double eps = args.attrs.get<BatchNormAttrs>().eps;
  const Tensor mean = in_compute(args.in[2], dtype, stream), variance = in_compute(args.in[3], dtype, stream),
               weight = in_compute(args.in[4], dtype, stream);
  if (has_columns(given) && args.out[0].is_channels_last() == given.is_channels_last()) {
    const bool last = !given.is_contiguous();
    const Tensor slopes = in_image_order(args.in[0], last, dtype, stream);
    if (reads_columns({&given, &slopes, &args.out[0]}, C)) {
      return normalize_columns_backward(slopes, given, {count, C, mean, variance, weight, Tensor(), eps}, args.out[0],
                                        args.out[1], args.out[2], stream);
    }
  }
  const Tensor dy = contiguous(args.in[0], stream), x = contiguous(given, stream);
  const DenseResult dx(args.out[0], x.dtype(), stream);
  launch(instance(stream, kImageCu, "channel_sums", {x.dtype()}), channel_grid(C), stream, dy.raw(), x.raw(),
         mean.raw(), variance.raw(), args.out[1].raw(), args.out[2].raw(), N, C, area, eps);
  launch(instance(stream, kImageCu, "channel_backward", {x.dtype()}), {.x = blocks_for(stream.device, x.elems())},
         stream, dy.raw(), x.raw(), mean.raw(), variance.raw(), place_or_null(weight), args.out[1].raw(),
         args.out[2].raw(), dx.made.raw(), x.elems(), count, C, area, eps);
  dx.store();
}

void running_average(const KernelArgs& args) {
  const auto& a = args.attrs.get<RunningAverageAttrs>();
  const Tensor running = contiguous(args.in[0], args.stream), now = contiguous(args.in[1], DType::kF64, args.stream);
  if (running.elems() == 0) return;
  const DenseResult out(args.out[0], running.dtype(), args.stream);
  launch(instance(args.stream, kImageCu, "move_average", {running.dtype()}),
         {.x = blocks_for(args.stream.device, running.elems())}, args.stream, running.raw(), now.raw(), out.made.raw(),
         running.elems(), a.momentum, a.scale);
  out.store();
}

void max_pool(const KernelArgs& args) {
  const PoolWindow window = window_of(args.attrs.get<PoolAttrs>());
  pool_to_largest(args, &window);
}
void adaptive_max_pool(const KernelArgs& args) { pool_to_largest(args, nullptr); }

void max_pool_backward(const KernelArgs& args) {
  const Stream stream = args.stream;
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor dy = in_image_order(args.in[0], last, args.in[0].dtype(), stream),
               indices = in_image_order(args.in[1], last, DType::kI64, stream);
  const DenseResult dx(args.out[0], dy.dtype(), stream, last);
  if (dy.elems() == 0) {
    set_zero(dx.made, stream);
    return dx.store();
  }
  const Pool p = pool_of(dx.made, dy, nullptr, last);
  const PoolStrides stride{std::max<int64_t>(1, p.h.size / p.h.outputs), std::max<int64_t>(1, p.w.size / p.w.outputs)};
  const Tensor reach = Tensor::empty({4}, DType::kI32, stream.device);
  set_zero(reach, stream);
  launch(instance(stream, kImageCu, "reach_of_indices", {}, "256"), {.x = blocks_for(stream.device, dy.elems())},
         stream, indices.raw(), reach.raw(), p, stride, fault_of(stream.device), row_number(args));
  launch(instance(stream, kImageCu, "pool_largest_backward", {dy.dtype()}),
         {.x = blocks_for(stream.device, dx.made.elems())}, stream, dy.raw(), indices.raw(), dx.made.raw(), reach.raw(),
         p, stride);
  dx.store();
}

void avg_pool(const KernelArgs& args) {
  const auto& a = args.attrs.get<AvgPoolAttrs>();
  const PoolWindow window = window_of(a);
  pool_to_mean(args, &window, a.count_include_pad, a.divisor);
}
void avg_pool_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<AvgPoolBackwardAttrs>();
  const PoolWindow window = window_of(a);
  pool_to_mean_backward(args, &window, a.count_include_pad, a.divisor);
}
void adaptive_avg_pool(const KernelArgs& args) { pool_to_mean(args, nullptr, true, 0); }
void adaptive_avg_pool_backward(const KernelArgs& args) { pool_to_mean_backward(args, nullptr, true, 0); }

namespace {
// As kernels see it (image.cu).
struct Resize {
  int64_t linear, align_corners;
  double ratio_h, ratio_w;
};
Resize resize_of(const InterpolateAttrs& a) {
  return {int64_t{a.mode == Interpolation::kLinear}, int64_t{a.align_corners}, a.ratio_h, a.ratio_w};
}
}  // namespace

void interpolate(const KernelArgs& args) {
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor x = in_image_order(args.in[0], last, args.in[0].dtype(), args.stream);
  const DenseResult y(args.out[0], x.dtype(), args.stream, last);
  launch(instance(args.stream, kImageCu, "resize", {x.dtype()}), {.x = blocks_for(args.stream.device, y.made.elems())},
         args.stream, x.raw(), y.made.raw(), pool_of(x, y.made, nullptr, last),
         resize_of(args.attrs.get<InterpolateAttrs>()));
  y.store();
}
void interpolate_backward(const KernelArgs& args) {
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor dy = in_image_order(args.in[0], last, args.in[0].dtype(), args.stream);
  const DenseResult dx(args.out[0], dy.dtype(), args.stream, last);
  if (dy.elems() == 0) {
    set_zero(dx.made, args.stream);
    return dx.store();
  }
  launch(instance(args.stream, kImageCu, "resize_backward", {dy.dtype()}),
         {.x = blocks_for(args.stream.device, dx.made.elems())}, args.stream, dy.raw(), dx.made.raw(),
         pool_of(dx.made, dy, nullptr, last), resize_of(args.attrs.get<InterpolateAttrs>()));
  dx.store();
}

}  // namespace chorale::kernel::cuda
