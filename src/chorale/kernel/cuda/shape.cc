#include "chorale/kernel/cuda/shape.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "chorale/device/cuda/space.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/shape_attrs.h"

namespace chorale::cuda {
extern const std::string_view kShapeCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kShapeCu;
using chorale::cuda::unit_in_text;

// What kernels see (shape.cu).
struct Padding {
  int64_t dims = 0, mode = 0;
  int64_t sizes[8] = {}, padded[8] = {}, before[8] = {};
};
Padding padding_of(const Shape& sizes, const PadAttrs& attrs) {
  Padding p;
  p.dims = static_cast<int64_t>(sizes.size());
  p.mode = static_cast<int64_t>(attrs.mode);
  const size_t listed = attrs.pads.size() / 2;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const size_t from_end = sizes.size() - 1 - d;
    const bool has = from_end < listed;
    p.before[d] = has ? attrs.pads[2 * from_end] : 0;
    p.sizes[d] = sizes[d];
    p.padded[d] = sizes[d] + p.before[d] + (has ? attrs.pads[2 * from_end + 1] : 0);
  }
  return p;
}

void keep_triangle(const KernelArgs& args, bool upper) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0], args.stream);
  launch(instance(args.stream, kShapeCu, "triangle", {}, unit_in_text(out.elem_bytes())),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, x.raw(), out.raw(), out.elems(), out.size(-2),
         out.size(-1), args.attrs.get<TriangleAttrs>().diagonal, int64_t{upper});
}

}  // namespace

void tril(const KernelArgs& args) { keep_triangle(args, false); }
void triu(const KernelArgs& args) { keep_triangle(args, true); }

void roll(const KernelArgs& args) {
  const auto& a = args.attrs.get<RollAttrs>();
  const Tensor &x = args.in[0], &out = args.out[0];
  if (out.elems() == 0) return;
  const auto d = static_cast<size_t>(normalize_dim("roll", a.dim, out.dims()));
  const int64_t length = out.sizes()[d], shift = (a.shift % length + length) % length;
  // `count` elements along the dimension, from one place to another.
  const auto move = [&](int64_t from, int64_t to, int64_t count) {
    if (count == 0) return;
    View source = View::of(x), target = View::of(out);
    source.offset += from * source.strides[d];
    target.offset += to * target.strides[d];
    source.sizes[d] = target.sizes[d] = count;
    copy_into(source.on(x), target.on(out), args.stream);
  };
  move(0, shift, length - shift);
  move(length - shift, 0, shift);
}

void pad(const KernelArgs& args) {
  const auto& a = args.attrs.get<PadAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0], args.stream), value = Tensor::scalar(a.value, out.dtype());
  const size_t bytes = out.elem_bytes();
  const CUfunction kernel = instance(args.stream, kShapeCu, "pad", {}, unit_in_text(bytes));
  // A parameter of a kernel has the size of its type.
  const auto run = [&](auto element) {
    std::memcpy(&element, value.raw(), sizeof(element));
    launch(kernel, {.x = blocks_for(args.stream.device, out.elems())}, args.stream, x.raw(), out.raw(), out.elems(),
           element, padding_of(x.sizes(), a));
  };
  struct alignas(16) Wide {
    uint64_t low, high;
  };
  if (bytes == 1) return run(uint8_t{});
  if (bytes == 2) return run(uint16_t{});
  if (bytes == 4) return run(uint32_t{});
  if (bytes == 8) return run(uint64_t{});
  run(Wide{});
}

void pad_backward(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Stream stream = args.stream;
  const DType compute = compute_of(out.dtype());
  const Padding p = padding_of(out.sizes(), args.attrs.get<PadAttrs>());
  // A dimension at a time, from the last to the first; only the last of these passes rounds.
  std::vector<size_t> dims;
  for (size_t d = out.sizes().size(); d-- > 0;) {
    if (p.before[d] != 0 || p.padded[d] != p.sizes[d]) dims.push_back(d);
  }
  Tensor now = contiguous(args.in[0], stream);
  for (size_t i = 0; i < dims.size(); ++i) {
    const size_t d = dims[i];
    Shape sizes = now.sizes();
    sizes[d] = p.sizes[d];
    const bool last = i + 1 == dims.size();
    const Tensor next =
        last && out.is_contiguous() ? out : Tensor::empty(sizes, last ? out.dtype() : compute, out.device());
    const Around a = around(sizes, static_cast<int64_t>(d));
    launch(instance(stream, kShapeCu, "pad_backward", {now.dtype(), next.dtype()}),
           {.x = blocks_for(stream.device, next.elems())}, stream, now.raw(), next.raw(), next.elems(), a.length,
           p.padded[d], a.inner, p.before[d], p.mode);
    now = next;
  }
  if (!now.is(out)) copy_into(now, out, stream);
}

void unfold_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<UnfoldBackwardAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor dy = contiguous(args.in[0], args.stream);
  const int64_t dim = normalize_dim("unfold", a.dim, out.dims());
  const Around shape = around(out.sizes(), dim);
  if (dy.elems() == 0) return set_zero(out, args.stream);
  launch(instance(args.stream, kShapeCu, "unfold_backward", {out.dtype()}),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, dy.raw(), out.raw(), out.elems(),
         shape.length, shape.inner, dy.sizes()[static_cast<size_t>(dim)], a.size, a.step);
}

}  // namespace chorale::kernel::cuda
