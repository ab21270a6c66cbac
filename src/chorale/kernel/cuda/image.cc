#include "chorale/kernel/cuda/image.h"

#include <algorithm>

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
  int64_t planes = 0;
  Side h, w;
  int64_t include_padding = 1, fixed = 0;
};

// A result that kernels write contiguously, and that is copied to where it belongs if it lies otherwise.
struct DenseResult {
  DenseResult(const Tensor& to, DType dtype, Stream its_stream)
      : target(to),
        made(to.is_contiguous() && to.dtype() == dtype ? to : Tensor::empty(to.sizes(), dtype, to.device())),
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
Pool pool_of(const Tensor& large, const Tensor& small, const PoolWindow* window) {
  Pool p;
  p.planes = large.size(0) * large.size(1);
  p.h = side_of(window ? &window->height : nullptr, large.size(2), small.size(2));
  p.w = side_of(window ? &window->width : nullptr, large.size(3), small.size(3));
  return p;
}

void pool_to_largest(const KernelArgs& args, const PoolWindow* window) {
  if (args.out[0].elems() == 0) return;
  const Tensor x = contiguous(args.in[0], args.stream);
  const DenseResult y(args.out[0], x.dtype(), args.stream), indices(args.out[1], DType::kI64, args.stream);
  launch(instance(args.stream, kImageCu, "pool_largest", {x.dtype()}),
         {.x = blocks_for(args.stream.device, y.made.elems())}, args.stream, x.raw(), y.made.raw(), indices.made.raw(),
         pool_of(x, y.made, window));
  y.store();
  indices.store();
}
void pool_to_mean(const KernelArgs& args, const PoolWindow* window, bool include_padding, int64_t fixed) {
  if (args.out[0].elems() == 0) return;
  const Tensor x = contiguous(args.in[0], args.stream);
  const DenseResult y(args.out[0], x.dtype(), args.stream);
  Pool p = pool_of(x, y.made, window);
  p.include_padding = include_padding ? 1 : 0;
  p.fixed = fixed;
  launch(instance(args.stream, kImageCu, "pool_mean", {x.dtype()}),
         {.x = blocks_for(args.stream.device, y.made.elems())}, args.stream, x.raw(), y.made.raw(), p);
  y.store();
}
void pool_to_mean_backward(const KernelArgs& args, const PoolWindow* window, bool include_padding, int64_t fixed) {
  if (args.out[0].elems() == 0) return;
  const Tensor dy = contiguous(args.in[0], args.stream);
  const DenseResult dx(args.out[0], dy.dtype(), args.stream);
  Pool p = pool_of(dx.made, dy, window);
  p.include_padding = include_padding ? 1 : 0;
  p.fixed = fixed;
  launch(instance(args.stream, kImageCu, "pool_mean_backward", {dy.dtype()}),
         {.x = blocks_for(args.stream.device, dx.made.elems())}, args.stream, dy.raw(), dx.made.raw(), p);
  dx.store();
}

}  // namespace

void batch_norm(const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor x = contiguous(args.in[0], stream);
  if (x.elems() == 0) return;
  const int64_t N = x.size(0), C = x.size(1), area = area_of(x);
  const double eps = args.attrs.get<BatchNormAttrs>().eps;
  const Tensor weight = in_compute(args.in[1], x.dtype(), stream), bias = in_compute(args.in[2], x.dtype(), stream);
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
  const Tensor dy = contiguous(args.in[0], stream), x = contiguous(args.in[1], stream);
  if (x.elems() == 0) return;
  const int64_t N = x.size(0), C = x.size(1), area = area_of(x), count = N * area;
  const double eps = args.attrs.get<BatchNormAttrs>().eps;
  const Tensor mean = in_compute(args.in[2], x.dtype(), stream), variance = in_compute(args.in[3], x.dtype(), stream),
               weight = in_compute(args.in[4], x.dtype(), stream);
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
  const Tensor dy = contiguous(args.in[0], stream), indices = contiguous(args.in[1], DType::kI64, stream);
  const DenseResult dx(args.out[0], compute_of(dy.dtype()), stream);
  set_zero(dx.made, stream);
  const Pool p = pool_of(dx.made, dy, nullptr);
  if (dy.elems() > 0) {
    launch(instance(stream, kImageCu, "pool_largest_backward", {dy.dtype()}),
           {.x = blocks_for(stream.device, p.planes, 64), .threads = 64}, stream, dy.raw(), indices.raw(),
           dx.made.raw(), p, fault_of(stream.device), row_number(args));
  }
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

}  // namespace chorale::kernel::cuda
