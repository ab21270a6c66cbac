#include "chorale/kernel/cuda/rows.h"

#include <algorithm>

#include "chorale/device/runtime.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/reduce.h"
#include "chorale/kernel/cuda/wide_rows.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/view.h"
#include "chorale/tensor/strided.h"

namespace chorale::cuda {
extern const std::string_view kRowsCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kRowsCu;

// What kernels see (rows.cu).
struct Lines {
  int64_t count, length, inner;
};
struct Classes {
  int64_t ignore_index, reduction, each;
  double smoothing;
  chorale::cuda::Fault* fault;
  int64_t row;
};

Lines lines_along(const Shape& sizes, int64_t dim) {
  const Around a = around(sizes, dim);
  return {a.lines(), a.length, a.inner};
}
Lines lines_of_classes(const Shape& sizes) { return lines_along(sizes, sizes.size() == 1 ? 0 : 1); }

Grid row_grid(int64_t rows, int64_t n) {
  return {.x = static_cast<unsigned>(std::clamp<int64_t>(rows, 1, 1 << 20)),
          .threads = row_threads(std::min<int64_t>(n, 512))};
}

void softmax_like(const KernelArgs& args, const char* more) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Lines lines = lines_along(out.sizes(), normalize_dim("softmax", args.attrs.get<DimAttrs>().dim, out.dims()));
  const Tensor x = contiguous(args.in[0], args.stream);
  launch(instance(args.stream, kRowsCu, "softmax", {out.dtype()}, more), row_grid(lines.count, lines.length),
         args.stream, x.raw(), out.raw(), lines);
}
void softmax_gradient(const KernelArgs& args, const char* more) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Lines lines = lines_along(out.sizes(), normalize_dim("softmax", args.attrs.get<DimAttrs>().dim, out.dims()));
  const Tensor dy = contiguous(args.in[0], args.stream), y = contiguous(args.in[1], args.stream);
  launch(instance(args.stream, kRowsCu, "softmax_backward", {out.dtype()}, more), row_grid(lines.count, lines.length),
         args.stream, dy.raw(), y.raw(), out.raw(), lines);
}

// An optional vector in the type that kernels compute in; null where it is absent.
struct Optional {
  Optional(const Tensor& x, DType dtype, Stream stream)
      : tensor(x.defined() ? contiguous(x, compute_of(dtype), stream) : Tensor()) {}
  void* raw() const { return tensor.defined() ? tensor.raw() : nullptr; }
  Tensor tensor;
};

void normalize_rows(const KernelArgs& args, bool centered) {
  const auto& a = args.attrs.get<LayerNormAttrs>();
  const Tensor x = contiguous(args.in[0], args.stream);
  const int64_t n = count_elems(a.normalized_shape.span()), rows = args.out[1].elems();
  if (rows == 0) return;
  const Optional weight(args.in[1], x.dtype(), args.stream),
      bias(centered ? args.in[2] : Tensor(), x.dtype(), args.stream);
  void* const means = centered ? args.out[1].raw() : nullptr;
  const RowNorm norm{rows, n, weight.raw(), bias.raw(), means, args.out[centered ? 2 : 1].raw(), a.eps};
  if (normalize_wide(x, norm, args.out[0], args.stream)) return;
  launch(instance(args.stream, kRowsCu, "normalize", {x.dtype()}, centered ? "true" : "false"), row_grid(rows, n),
         args.stream, x.raw(), weight.raw(), bias.raw(), args.out[0].raw(), means, args.out[centered ? 2 : 1].raw(),
         rows, n, a.eps);
}

void normalize_rows_backward(const KernelArgs& args, bool centered) {
  const auto& a = args.attrs.get<LayerNormBackwardAttrs>();
  const Stream stream = args.stream;
  const Tensor dy = contiguous(args.in[0], stream), x = contiguous(args.in[1], stream);
  const DType dtype = x.dtype(), compute = compute_of(dtype);
  const int64_t n = count_elems(a.normalized_shape.span()), rows = n == 0 ? 0 : x.elems() / n;
  const Optional mean(centered ? args.in[2] : Tensor(), dtype, stream), rstd(args.in[centered ? 3 : 2], dtype, stream),
      weight(args.in[centered ? 4 : 3], dtype, stream);
  const RowNorm norm{rows, n, weight.raw(), nullptr, mean.raw(), rstd.raw(), a.eps};
  if (normalize_backward_wide(dy, x, norm, args.out[0], a.affine ? args.out[1] : Tensor(),
                              a.affine && centered ? args.out[2] : Tensor(), stream))
    return;
  const char* const more = centered ? "true" : "false";
  if (rows > 0) {
    launch(instance(stream, kRowsCu, "normalize_backward", {dtype}, more), row_grid(rows, n), stream, dy.raw(), x.raw(),
           mean.raw(), rstd.raw(), weight.raw(), args.out[0].raw(), rows, n, a.eps);
  }
  if (!a.affine || n == 0) return;
  const int64_t tiles = (n + 31) / 32;
  const int64_t chunks = std::clamp<int64_t>(int64_t{8} * chorale::cuda::multiprocessors(stream.device) / tiles, 1,
                                             std::max<int64_t>(1, rows / 8));
  const Tensor partial = Tensor::empty({chunks * 2 * n}, compute, stream.device);
  launch(instance(stream, kRowsCu, "normalize_sums", {dtype}, more),
         {.x = static_cast<unsigned>(tiles), .y = static_cast<unsigned>(chunks)}, stream, dy.raw(), x.raw(), mean.raw(),
         rstd.raw(), partial.raw(), rows, n);
  void* const dbias = centered ? args.out[2].raw() : nullptr;
  launch(instance(stream, kRowsCu, "normalize_totals", {compute}), {.x = blocks_for(stream.device, n)}, stream,
         partial.raw(), args.out[1].raw(), dbias, chunks, n);
}

// y is normalised apart where it has another dtype.
Tensor wide_of(const Tensor& narrow, DType wide) {
  return narrow.dtype() == wide ? narrow : Tensor::empty(narrow.sizes(), wide, narrow.device());
}

// Targets that are classes, and what a mean is divided by.
struct Targets {
  Targets(const Tensor& target, const Tensor& weights, Reduction reduction, int64_t classes, int64_t ignore_index,
          DType dtype, Stream stream)
      : list(contiguous(target, DType::kI64, stream)), weight(weights, dtype, stream) {
    if (reduction != Reduction::kMean) return;
    total = Tensor::empty({}, DType::kF64, stream.device);
    launch(instance(stream, kRowsCu, "weight_of_targets", {compute_of(dtype)}), {.threads = 1024}, stream, list.raw(),
           weight.raw(), total.raw(), list.elems(), classes, ignore_index);
  }
  void* divisor() const { return total.defined() ? total.raw() : nullptr; }
  Tensor list;
  Optional weight;
  Tensor total;
};

// Losses of single elements become the result: themselves, their sum or their mean.
void reduce_losses(const Tensor& losses, Reduction reduction, const Targets& targets, const Tensor& out,
                   Stream stream) {
  if (reduction == Reduction::kNone)
    return copy_into(losses.view_as(out.sizes(), contiguous_strides(out.sizes()), 0), out, stream);
  launch(instance(stream, kRowsCu, "loss_total", {out.dtype()}), {.threads = 1024}, stream, losses.raw(),
         targets.divisor(), out.raw(), losses.elems());
}

Classes classes_of(const KernelArgs& args, int64_t ignore_index, Reduction reduction, double smoothing) {
  return {ignore_index, static_cast<int64_t>(reduction), reduction == Reduction::kNone ? 1 : 0,
          smoothing,    fault_of(args.stream.device),    row_number(args)};
}

// Whether the classes of a row lie side by side and count alike.
bool is_plain(const Lines& lines, const Tensor& weight, const CrossEntropyAttrs& a) {
  return lines.count > 0 && lines.inner == 1 && !weight.defined() && a.label_smoothing == 0;
}
// `dx` may be absent.
RowLoss row_loss(const KernelArgs& args, const Lines& lines, const Tensor& x, const Tensor& targets, const Tensor& dx,
                 const CrossEntropyAttrs& a) {
  const auto row = [&](const Tensor& of) { return of.defined() && of.dims() == 2 ? of.stride(0) : lines.length; };
  return {lines.count, lines.length, a.ignore_index, row(x), row(dx), targets.raw(), row_number(args)};
}
// Rows of classes may begin further apart than they are long (op/defs/padded_rows.h).
Tensor rows_of_classes(const Tensor& x, Stream stream) {
  const bool in_rows = x.dims() == 2 && x.stride(1) == 1 && x.stride(0) > x.size(1);
  return in_rows ? x : contiguous(x, stream);
}

}  // namespace

void softmax(const KernelArgs& args) { softmax_like(args, "false"); }
void log_softmax(const KernelArgs& args) { softmax_like(args, "true"); }
void softmax_backward(const KernelArgs& args) { softmax_gradient(args, "false"); }
void log_softmax_backward(const KernelArgs& args) { softmax_gradient(args, "true"); }
void layer_norm(const KernelArgs& args) { normalize_rows(args, true); }
void layer_norm_backward(const KernelArgs& args) { normalize_rows_backward(args, true); }
void add_layer_norm(const KernelArgs& args) {
  const auto& a = args.attrs.get<LayerNormAttrs>();
  const Stream stream = args.stream;
  const Tensor x = contiguous(args.in[0], stream), more = contiguous(args.in[1], stream);
  const Tensor &sum = args.out[0], &y = args.out[1];
  const Optional weight(args.in[2], x.dtype(), stream), bias(args.in[3], x.dtype(), stream);
  const RowNorm norm{args.out[2].elems(),
                     count_elems(a.normalized_shape.span()),
                     weight.raw(),
                     bias.raw(),
                     args.out[2].raw(),
                     args.out[3].raw(),
                     a.eps};
  if (norm.rows > 0 && normalize_wide(x, norm, y, stream, more, sum)) return;
  add_narrow(x, more, sum, stream);
  const Tensor wide = wide_of(y, x.dtype());
  const Tensor in[] = {sum, args.in[2], args.in[3]};
  Tensor out[] = {wide, args.out[2], args.out[3]};
  layer_norm({in, out, args.attrs, stream});
  if (!wide.is(y)) copy_into(wide, y, stream);
}

namespace {
// A fifth result: the sums of the second one's columns.
void add_norm_backward(const KernelArgs& args, const Tensor& sums) {
  const auto& a = args.attrs.get<LayerNormBackwardAttrs>();
  const Stream stream = args.stream;
  const Tensor more = args.in[0].defined() ? contiguous(args.in[0], stream) : Tensor(),
               dy = contiguous(args.in[1], stream), x = contiguous(args.in[2], stream);
  const Tensor &dx = args.out[0], &lower = args.out[1];
  const int64_t n = count_elems(a.normalized_shape.span()), rows = n == 0 ? 0 : x.elems() / n;
  const Optional mean(args.in[3], x.dtype(), stream), rstd(args.in[4], x.dtype(), stream),
      weight(args.in[5], x.dtype(), stream);
  const RowNorm norm{rows, n, weight.raw(), nullptr, mean.raw(), rstd.raw(), a.eps};
  if (normalize_backward_wide(dy, x, norm, dx, a.affine ? args.out[2] : Tensor(), a.affine ? args.out[3] : Tensor(),
                              stream, more, lower, sums))
    return;
  if (sums.defined()) {
    add_layer_norm_backward({args.in, args.out.first(4), args.attrs, stream, args.pointwise, args.row});
    return sum_over(lower.view_as({rows, n}, {n, 1}, lower.offset()), 0, sums, stream);
  }
  const Tensor in[] = {contiguous(dy, x.dtype(), stream), x, args.in[3], args.in[4], args.in[5]};
  Tensor out[] = {more.defined() ? Tensor::empty(dx.sizes(), dx.dtype(), dx.device()) : dx, args.out[2], args.out[3]};
  layer_norm_backward({in, out, args.attrs, stream});
  if (more.defined()) add_narrow(more, out[0], dx, stream);
  if (dx.elems() > 0) copy_into(dx, lower, stream);
}
}  // namespace

void add_layer_norm_backward(const KernelArgs& args) { add_norm_backward(args, Tensor()); }
void add_layer_norm_backward_summed(const KernelArgs& args) { add_norm_backward(args, args.out[4]); }

void rms_norm(const KernelArgs& args) { normalize_rows(args, false); }
void rms_norm_backward(const KernelArgs& args) { normalize_rows_backward(args, false); }

void cross_entropy(const KernelArgs& args) {
  const auto& a = args.attrs.get<CrossEntropyAttrs>();
  const Lines lines = lines_of_classes(args.in[0].sizes());
  const bool plain = is_plain(lines, args.in[2], a);
  if (plain && is_small(lines.count, lines.length)) {
    const Tensor x = contiguous(args.in[0], args.stream), list = contiguous(args.in[1], DType::kI64, args.stream);
    return cross_entropy_small(x, row_loss(args, lines, x, list, Tensor(), a), a.reduction, args.out[1], args.out[0],
                               args.stream);
  }
  const Tensor x = plain ? rows_of_classes(args.in[0], args.stream) : contiguous(args.in[0], args.stream);
  const Targets targets(args.in[1], args.in[2], a.reduction, lines.length, a.ignore_index, x.dtype(), args.stream);
  const Tensor losses = Tensor::empty({lines.count}, compute_of(x.dtype()), x.device());
  if (plain) {
    cross_entropy_wide(x, row_loss(args, lines, x, targets.list, Tensor(), a), args.out[1], losses, args.stream);
  } else if (lines.count > 0) {
    launch(instance(args.stream, kRowsCu, "cross_entropy", {x.dtype()}), row_grid(lines.count, lines.length),
           args.stream, x.raw(), targets.list.raw(), targets.weight.raw(), args.out[1].raw(), losses.raw(), lines,
           classes_of(args, a.ignore_index, a.reduction, a.label_smoothing));
  }
  reduce_losses(losses, a.reduction, targets, args.out[0], args.stream);
}

void cross_entropy_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<CrossEntropyAttrs>();
  const Lines lines = lines_of_classes(args.in[1].sizes());
  if (lines.count == 0) return;
  const bool plain = is_plain(lines, args.in[3], a);
  const Tensor x = plain ? rows_of_classes(args.in[1], args.stream) : contiguous(args.in[1], args.stream);
  const DType compute = compute_of(x.dtype());
  const Tensor& dx = args.out[0];
  const Tensor dloss = contiguous(args.in[0], compute, args.stream),
               lse = contiguous(args.in[4], DType::kF64, args.stream);
  if (plain && is_small(lines.count, lines.length)) {
    const Tensor list = contiguous(args.in[2], DType::kI64, args.stream);
    return cross_entropy_backward_wide(dloss, x, row_loss(args, lines, x, list, dx, a), lse, nullptr, a.reduction, dx,
                                       args.stream);
  }
  const Targets targets(args.in[2], args.in[3], a.reduction, lines.length, a.ignore_index, x.dtype(), args.stream);
  if (plain) {
    return cross_entropy_backward_wide(dloss, x, row_loss(args, lines, x, targets.list, dx, a), lse, targets.divisor(),
                                       a.reduction, dx, args.stream);
  }
  const Tensor to = dx.is_contiguous() ? dx : Tensor::empty(dx.sizes(), dx.dtype(), dx.device());
  launch(instance(args.stream, kRowsCu, "cross_entropy_backward", {x.dtype()}), row_grid(lines.count, lines.length),
         args.stream, dloss.raw(), x.raw(), targets.list.raw(), targets.weight.raw(), lse.raw(), targets.divisor(),
         to.raw(), lines, classes_of(args, a.ignore_index, a.reduction, a.label_smoothing));
  if (!to.is(dx)) copy_into(to, dx, args.stream);
}

void cross_entropy_with_slopes(const KernelArgs& args) {
  const auto& a = args.attrs.get<CrossEntropyAttrs>();
  const Stream stream = args.stream;
  const Tensor &dx = args.out[2], &logits = args.in[1];
  const Lines lines = lines_of_classes(logits.sizes());
  const DType compute = compute_of(logits.dtype());
  if (is_plain(lines, args.in[3], a)) {
    const Tensor dloss = args.in[0].defined() ? contiguous(args.in[0], compute, stream) : Tensor();
    if (is_small(lines.count, lines.length) && dx.is_contiguous()) {
      const Tensor x = contiguous(logits, stream), list = contiguous(args.in[2], DType::kI64, stream);
      return cross_entropy_small(x, row_loss(args, lines, x, list, dx, a), a.reduction, args.out[1], args.out[0],
                                 stream, dloss, dx);
    }
    const Tensor x = rows_of_classes(logits, stream);
    const Targets targets(args.in[2], args.in[3], a.reduction, lines.length, a.ignore_index, x.dtype(), stream);
    const Tensor losses = Tensor::empty({lines.count}, compute, x.device());
    cross_entropy_both_ways(dloss, x, row_loss(args, lines, x, targets.list, dx, a), targets.divisor(), a.reduction,
                            args.out[1], losses, dx, stream);
    return reduce_losses(losses, a.reduction, targets, args.out[0], stream);
  }
  cross_entropy({args.in.subspan(1), args.out.first(2), args.attrs, stream, args.pointwise, args.row});
  Tensor dloss = args.in[0];
  if (!dloss.defined()) {
    dloss = Tensor::empty(args.out[0].sizes(), DType::kF32, logits.device());
    constexpr float kOne = 1;
    if (dloss.elems() > 0) runtime_of(stream.device).fill(&kOne, strided(dloss), stream);
  }
  const Tensor in[] = {dloss, logits, args.in[2], args.in[3], args.out[1]};
  cross_entropy_backward({in, args.out.subspan(2), args.attrs, stream, args.pointwise, args.row});
}

void nll_loss(const KernelArgs& args) {
  const auto& a = args.attrs.get<NllLossAttrs>();
  const Tensor x = contiguous(args.in[0], args.stream);
  const Lines lines = lines_of_classes(x.sizes());
  const Targets targets(args.in[1], args.in[2], a.reduction, lines.length, a.ignore_index, x.dtype(), args.stream);
  const Tensor losses = Tensor::empty({lines.count}, compute_of(x.dtype()), x.device());
  if (lines.count > 0) {
    launch(instance(args.stream, kRowsCu, "picked_losses", {x.dtype()}),
           {.x = blocks_for(args.stream.device, lines.count)}, args.stream, x.raw(), targets.list.raw(),
           targets.weight.raw(), losses.raw(), lines, classes_of(args, a.ignore_index, a.reduction, 0));
  }
  reduce_losses(losses, a.reduction, targets, args.out[0], args.stream);
}

void nll_loss_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<NllLossBackwardAttrs>();
  const Tensor& dx = args.out[0];
  const Lines lines = lines_of_classes(dx.sizes());
  set_zero(dx, args.stream);
  if (lines.count == 0) return;
  const Targets targets(args.in[1], args.in[2], a.reduction, lines.length, a.ignore_index, dx.dtype(), args.stream);
  const Tensor dloss = contiguous(args.in[0], compute_of(dx.dtype()), args.stream);
  launch(instance(args.stream, kRowsCu, "picked_losses_backward", {dx.dtype()}),
         {.x = blocks_for(args.stream.device, lines.count)}, args.stream, dloss.raw(), targets.list.raw(),
         targets.weight.raw(), targets.divisor(), dx.raw(), lines, classes_of(args, a.ignore_index, a.reduction, 0));
}

}  // namespace chorale::kernel::cuda
