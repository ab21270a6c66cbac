#include "chorale/kernel/cpu/index/index.h"

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/index/checked_indices.h"
#include "chorale/kernel/cpu/index/indexed_runs.h"
#include "chorale/kernel/cpu/index/modified_copy.h"
#include "chorale/kernel/cpu/support/accumulate.h"
#include "chorale/kernel/index_attrs.h"
#include "chorale/kernel/index_layout.h"

namespace chorale::kernel::cpu {
namespace {

int64_t bytes_of(const Tensor& x) { return x.elems() * static_cast<int64_t>(x.elem_bytes()); }

// The slices of `sizes` along a dimension that an index names.
Picks slices(const char* op, const Shape& sizes, int64_t dim, const Tensor& index) {
  const int64_t at = normalize_dim(op, dim, static_cast<int64_t>(sizes.size()));
  const Around parts = around(sizes, at);
  return {parts, checked_indices(op, index, parts.length, at)};
}

// x[picks] += alpha * list, in the order of the list. `work` and `list` are contiguous and of one dtype.
void add_picks(const Picks& picks, const Tensor& list, const Tensor& work, Scalar alpha) {
  visit_dtype(work.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_half(dtype_of<T>)) {
      CHORALE_INVARIANT(false, "16-bit types are added in f32");
    } else if (alpha == Scalar(1)) {
      picks.add(list.data<T>(), work.data<T>(),
                [](T& place, T value) { place = from_sum<T>(to_sum(place) + to_sum(value)); });
    } else {
      const Sum<T> factor = to_sum(alpha.to<T>());
      picks.add(list.data<T>(), work.data<T>(),
                [&](T& place, T value) { place = from_sum<T>(to_sum(place) + factor * to_sum(value)); });
    }
  });
}

// The gradient of picking: zeros, plus dy at the picked places.
void add_to_zeros(const Picks& picks, const Tensor& dy, const Tensor& out) {
  const DType compute = compute_of(out.dtype());
  const Tensor list = contiguous(dy, compute);
  const Tensor work = compute == out.dtype() ? out : Tensor::empty(out.sizes(), compute);
  zero_bytes(work.raw(), bytes_of(work));
  add_picks(picks, list, work, 1);
  if (!work.is(out)) copy_into(work, out);
}

// Values as the list that Picks wants: of the result's shape, contiguous, in `dtype`.
Tensor as_list(const Tensor& values, const Shape& result, DType dtype) {
  const Strides strides = broadcast_strides(values.sizes(), values.strides(), result);
  return contiguous(values.view_as(result, strides, values.offset()), dtype);
}

}  // namespace

void index_select(const KernelArgs& args) {
  const Picks picks = slices("index_select", args.in[0].sizes(), args.attrs.get<DimAttrs>().dim, args.in[1]);
  picks.take(contiguous(args.in[0]).raw(), args.out[0].raw(), args.out[0].elem_bytes());
}

void index_select_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<DimBackwardAttrs>();
  add_to_zeros(slices("index_select", args.out[0].sizes(), a.dim, args.in[1]), args.in[0], args.out[0]);
}

void index_add(const KernelArgs& args) {
  const auto& a = args.attrs.get<IndexAddAttrs>();
  const Tensor &x = args.in[0], &out = args.out[0];
  const Picks picks = slices("index_add", x.sizes(), a.dim, args.in[1]);
  const DType compute = compute_of(x.dtype());
  const Tensor list = contiguous(apart(args.in[2], out), compute);
  modify(x, out, compute, [&](const Tensor& work) { add_picks(picks, list, work, a.alpha); });
}

void index_copy(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const Picks picks = slices("index_copy", x.sizes(), args.attrs.get<DimAttrs>().dim, args.in[1]);
  const Tensor list = contiguous(apart(args.in[2], out));
  modify(x, out, x.dtype(), [&](const Tensor& work) { picks.put(list.raw(), work.raw(), work.elem_bytes()); });
}

void index_fill(const KernelArgs& args) {
  const auto& a = args.attrs.get<FillAttrs>();
  const Tensor &x = args.in[0], &out = args.out[0];
  const Picks picks = slices("index_fill", x.sizes(), a.dim, args.in[1]);
  const Tensor value = Tensor::scalar(a.value, x.dtype());
  modify(x, out, x.dtype(), [&](const Tensor& work) { picks.fill(value.raw(), work.raw(), work.elem_bytes()); });
}

void index(const KernelArgs& args) {
  const Picks picks("index", args.in[0].sizes(), args.in.subspan(1));
  picks.take(contiguous(args.in[0]).raw(), args.out[0].raw(), args.out[0].elem_bytes());
}

void index_backward(const KernelArgs& args) {
  add_to_zeros(Picks("index", args.out[0].sizes(), args.in.subspan(1)), args.in[0], args.out[0]);
}

void index_put(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const auto indices = args.in.subspan(2);
  const Picks picks("index_put", x.sizes(), indices);
  const bool accumulate = args.attrs.get<IndexPutAttrs>().accumulate;
  const DType compute = accumulate ? compute_of(x.dtype()) : x.dtype();
  const Tensor list = as_list(apart(args.in[1], out), index_layout("index_put", x.sizes(), indices).result, compute);
  modify(x, out, compute, [&](const Tensor& work) {
    if (accumulate) {
      add_picks(picks, list, work, 1);
    } else {
      picks.put(list.raw(), work.raw(), work.elem_bytes());
    }
  });
}

}  // namespace chorale::kernel::cpu
