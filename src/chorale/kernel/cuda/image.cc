#include "chorale/kernel/cuda/image.h"

#include <algorithm>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/image_order.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/pool_window.h"

namespace chorale::cuda {
extern const std::string_view kImageCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kImageCu;

// What kernels see (image.cu).
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

// The order of all operands. A result of one place per channel has both orders at once, and the input decides.
bool has_channels_last(const KernelArgs& args) {
  const Tensor &in = args.in[0], &out = args.out[0];
  if (in.dims() != 4) return false;
  return !out.is_contiguous() ? out.is_channels_last()
                              : out.is_channels_last() && in.is_channels_last() && !in.is_contiguous();
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

// The channels that a thread takes: those of 16 bytes of the first tensor where they lie side by side and places fit
// into 32 bits.
int64_t pack_of(const Pool& p, std::initializer_list<const Tensor*> all, int64_t most_elems) {
  const Tensor& first = **all.begin();
  const auto pack = static_cast<int64_t>(16 / size_of(first.dtype()));
  const bool fits =
      p.last && p.channels % pack == 0 && most_elems <= INT32_MAX &&
      std::all_of(all.begin(), all.end(), [](auto* x) { return reinterpret_cast<uintptr_t>(x->raw()) % 16 == 0; });
  return fits ? pack : 1;
}

void pool_to_largest(const KernelArgs& args, const PoolWindow* window) {
  if (args.out[0].elems() == 0) return;
  const bool last = has_channels_last(args);
  const Tensor x = in_image_order(args.in[0], last, args.in[0].dtype(), args.stream);
  const DenseResult y(args.out[0], x.dtype(), args.stream, last), indices(args.out[1], DType::kI64, args.stream, last);
  const Pool p = pool_of(x, y.made, window, last);
  const int64_t pack = pack_of(p, {&x, &y.made, &indices.made}, x.elems());
  launch(instance(args.stream, kImageCu, pack > 1 ? "pool_largest_packs" : "pool_largest", {x.dtype()}),
         {.x = blocks_for(args.stream.device, y.made.elems() / pack)}, args.stream, x.raw(), y.made.raw(),
         indices.made.raw(), p);
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

}  // namespace

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
  const int64_t pack = pack_of(p, {&dy, &dx.made, &indices}, std::max(dx.made.elems(), dy.elems()));
  const bool packs = pack > 1 && p.channels % 8 == 0;
  launch(instance(stream, kImageCu, "reach_of_indices", {}, packs ? "256, 8" : "256, 1"),
         {.x = blocks_for(stream.device, dy.elems() / (packs ? 8 : 1))}, stream, indices.raw(), reach.raw(), p, stride,
         fault_of(stream.device), row_number(args));
  if (packs && stride.h == 2 && stride.w == 2) {
    const int64_t quads = p.samples * ((p.h.size + 1) / 2) * ((p.w.size + 1) / 2) * p.channels / pack;
    launch(instance(stream, kImageCu, "pool_largest_backward_quads", {dy.dtype()}),
           {.x = blocks_for(stream.device, quads)}, stream, dy.raw(), indices.raw(), dx.made.raw(), reach.raw(), p);
    return dx.store();
  }
  launch(instance(stream, kImageCu, packs ? "pool_largest_backward_packs" : "pool_largest_backward", {dy.dtype()}),
         {.x = blocks_for(stream.device, dx.made.elems() / (packs ? pack : 1))}, stream, dy.raw(), indices.raw(),
         dx.made.raw(), reach.raw(), p, stride);
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
// What kernels see (image.cu).
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
