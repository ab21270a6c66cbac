#include "chorale/kernel/cuda/creation.h"

#include "chorale/device/runtime.h"
#include "chorale/kernel/creation_attrs.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/full_like_attrs.h"
#include "chorale/kernel/shape_attrs.h"
#include "chorale/tensor/strided.h"

namespace chorale::cuda {
extern const std::string_view kCreationCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kCreationCu;

void fill_with(const Tensor& out, Scalar number, Stream stream) {
  if (out.elems() == 0) return;
  const Tensor value = Tensor::scalar(number, out.dtype());
  runtime_of(stream.device).fill(value.raw(), strided(out), stream);
}

// The result is zero but where the view shows it: there it is dy.
void write_through_view(const Tensor& dy, const View& view, const Tensor& out, Stream stream) {
  set_zero(out, stream);
  copy_into(dy, out.view_as(view.sizes, view.strides, out.offset() + view.offset), stream);
}

// Each input into its stretch of dimension `dim`; a stacked input takes 1 and lacks that dimension.
void join_along(const KernelArgs& args, int64_t dim, bool stacked) {
  const Tensor& out = args.out[0];
  const auto d = static_cast<size_t>(dim);
  int64_t at = 0;
  for (const Tensor& x : args.in) {
    if (!stacked && x.dims() != out.dims()) continue;  // an empty vector fits anything and counts for nothing
    const int64_t length = stacked ? 1 : x.sizes()[d];
    View view = View::of(out);
    view.offset += at * view.strides[d];
    at += length;
    if (x.elems() == 0) continue;
    if (stacked) {
      view.sizes.erase(d);
      view.strides.erase(d);
    } else {
      view.sizes[d] = length;
    }
    copy_into(x, view.on(out), args.stream);
  }
}

}  // namespace

void full(const KernelArgs& args) { fill_with(args.out[0], args.attrs.get<FullAttrs>().value, args.stream); }
void full_like(const KernelArgs& args) { fill_with(args.out[0], args.attrs.get<FullLikeAttrs>().value, args.stream); }

void arange(const KernelArgs& args) {
  const auto& a = args.attrs.get<RangeAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const int64_t whole =
      is_integral(out.dtype()) && a.start.kind() <= Scalar::Kind::kInt && a.step.kind() <= Scalar::Kind::kInt ? 1 : 0;
  launch(instance(args.stream, kCreationCu, "count_up", {out.dtype()}),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, out.raw(), out.elems(), whole,
         a.start.integer(), a.step.integer(), a.start.real(), a.step.real());
}

void linspace(const KernelArgs& args) {
  const auto& a = args.attrs.get<LinspaceAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const double step = a.count > 1 ? (a.end - a.start) / static_cast<double>(a.count - 1) : 0;
  launch(instance(args.stream, kCreationCu, "spread_out", {out.dtype()}),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, out.raw(), out.elems(), a.start, a.end, step);
}

void eye(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  launch(instance(args.stream, kCreationCu, "identity", {out.dtype()}),
         {.x = blocks_for(args.stream.device, out.elems())}, args.stream, out.raw(), out.size(0), out.size(1));
}

void cat(const KernelArgs& args) {
  join_along(args, normalize_dim("cat", args.attrs.get<DimAttrs>().dim, args.out[0].dims()), false);
}
void stack(const KernelArgs& args) {
  join_along(args, normalize_dim("stack", args.attrs.get<DimAttrs>().dim, args.out[0].dims()), true);
}

void flip(const KernelArgs& args) {
  const Tensor& x = args.in[0];
  if (x.elems() == 0) return;
  View view = View::of(x);
  for (const int64_t entry : args.attrs.get<DimsAttrs>().dims) {
    if (x.dims() == 0) break;
    const auto dim = static_cast<size_t>(normalize_dim("flip", entry, x.dims()));
    view.offset += (view.sizes[dim] - 1) * view.strides[dim];
    view.strides[dim] = -view.strides[dim];
  }
  copy_into(view.on(x), args.out[0], args.stream);
}

void slice_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<SliceBackwardAttrs>();
  write_through_view(args.in[0], slice_view(View::contiguous(args.out[0].sizes()), forward_of(a)), args.out[0],
                     args.stream);
}
void diagonal_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<DiagonalBackwardAttrs>();
  write_through_view(args.in[0], diagonal_view(View::contiguous(args.out[0].sizes()), forward_of(a)), args.out[0],
                     args.stream);
}

}  // namespace chorale::kernel::cuda
