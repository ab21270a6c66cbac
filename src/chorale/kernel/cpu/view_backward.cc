#include "chorale/kernel/cpu/view_backward.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/support/accumulate.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/view.h"

namespace chorale::kernel::cpu {
namespace {

int64_t bytes_of(const Tensor& x) { return x.elems() * static_cast<int64_t>(x.elem_bytes()); }

// out = 0, then dy where `view` looks; the places it shows are distinct.
void write_through(const Tensor& dy, const View& view, const Tensor& out) {
  zero_bytes(out.raw(), bytes_of(out));
  copy_into(dy, out.view_as(view.sizes, view.strides, out.offset() + view.offset));
}

// Calls f with the offset of every element in row-major order.
template <class F>
void for_each_place(const Shape& sizes, const Strides& strides, int64_t offset, F&& f) {
  if (count_elems(sizes) == 0) return;
  Shape at(sizes.size(), 0);
  while (true) {
    f(offset);
    size_t d = sizes.size();
    for (;;) {
      if (d == 0) return;
      --d;
      offset += strides[d];
      if (++at[d] < sizes[d]) break;
      offset -= strides[d] * sizes[d];
      at[d] = 0;
    }
  }
}

int64_t last_place(const Shape& sizes, const Strides& strides) {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) last += std::max<int64_t>(sizes[i] - 1, 0) * strides[i];
  return last;
}

}  // namespace

void flip(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  if (out.elems() == 0) return;
  View view = View::of(x);
  for (int64_t entry : args.attrs.get<DimsAttrs>().dims) {
    if (x.dims() == 0) break;
    const auto dim = static_cast<size_t>(normalize_dim("flip", entry, x.dims()));
    view.offset += (view.sizes[dim] - 1) * view.strides[dim];
    view.strides[dim] = -view.strides[dim];
  }
  copy_into(view.on(x), out);
}

void slice_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<SliceBackwardAttrs>();
  const Tensor &dy = args.in[0], &out = args.out[0];
  const auto dim = static_cast<size_t>(normalize_dim("slice", a.dim, out.dims()));
  const View view = slice_view(View::contiguous(out.sizes()), forward_of(a));
  const Around parts = around(out.sizes(), static_cast<int64_t>(dim));
  const auto elem = static_cast<int64_t>(out.elem_bytes());
  const int64_t piece = view.sizes[dim] * parts.inner * elem;  // of dy, for one index of the dimensions before dim
  constexpr int64_t kSmall = 64;                               // a call per piece costs more than a second pass over it
  if (a.step != 1 || !dy.is_contiguous() || piece < kSmall) return write_through(dy, view, out);
  // One pass over the result: zeros before, the gradient, zeros after.
  const int64_t row = parts.length * parts.inner * elem, before = view.offset * elem;
  const auto* from = static_cast<const std::byte*>(dy.raw());
  auto* to = static_cast<std::byte*>(out.raw());
  parallel_for(parts.outer, items_grain(row), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memset(to + i * row, 0, static_cast<size_t>(before));
      std::memcpy(to + i * row + before, from + i * piece, static_cast<size_t>(piece));
      std::memset(to + i * row + before + piece, 0, static_cast<size_t>(row - before - piece));
    }
  });
}

void diagonal_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<DiagonalBackwardAttrs>();
  write_through(args.in[0], diagonal_view(View::contiguous(args.out[0].sizes()), forward_of(a)), args.out[0]);
}

void unfold_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<UnfoldBackwardAttrs>();
  const Tensor& out = args.out[0];
  const View view = unfold_view(View::contiguous(out.sizes()), forward_of(a));
  if (a.step >= a.size) return write_through(args.in[0], view, out);  // windows do not overlap
  const Tensor dy = contiguous(args.in[0]);
  // dy is [outer, windows, inner, size], out [outer, length, inner]. Each place of the result collects its windows in
  // order, so that the sum does not depend on threads.
  const auto dim = static_cast<size_t>(normalize_dim("unfold", a.dim, out.dims()));
  const Around parts = around(out.sizes(), static_cast<int64_t>(dim));
  const int64_t length = parts.length, inner = parts.inner;
  const int64_t windows = view.sizes[dim];
  if (out.elems() == 0) return;
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = dy.data<T>();
    T* to = out.data<T>();
    parallel_for(parts.outer * length, std::max<int64_t>(1, 4096 / inner), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t outer = row / length, at = row % length;
        const int64_t first = at < a.size ? 0 : (at - a.size) / a.step + 1;
        const int64_t last = std::min(at / a.step, windows - 1);
        for (int64_t j = 0; j < inner; ++j) {
          Sum<T> sum{};
          for (int64_t w = first; w <= last; ++w) {
            sum += to_sum(from[((outer * windows + w) * inner + j) * a.size + at - w * a.step]);
          }
          to[row * inner + j] = from_sum<T>(sum);
        }
      }
    });
  });
}

void as_strided_backward(const KernelArgs& args) {
  const auto& a = args.attrs.get<AsStridedAttrs>();
  const Tensor &x = args.in[1], &out = args.out[0];
  const Tensor dy = contiguous(args.in[0]);
  const Shape sizes = a.sizes.shape();
  const Strides strides = a.strides.shape();
  // A buffer for all places that x or its view touch, counted from the lower of their first ones.
  const int64_t low = std::min<int64_t>(0, a.offset);
  const int64_t high = std::max(last_place(x.sizes(), x.strides()), a.offset + last_place(sizes, strides));
  const auto places = static_cast<size_t>(high - low + 1);
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_differentiable(dtype_of<T>)) {
      using Real = decltype(std::abs(Sum<T>{}));
      std::vector<Sum<T>> sums(places);
      const T* from = dy.data<T>();
      for_each_place(sizes, strides, a.offset - low,
                     [&](int64_t at) { sums[static_cast<size_t>(at)] += to_sum(*from++); });
      std::vector<Real> shared(places, 0);
      for_each_place(x.sizes(), x.strides(), -low, [&](int64_t at) { shared[static_cast<size_t>(at)] += 1; });
      T* to = out.data<T>();
      for_each_place(x.sizes(), x.strides(), -low, [&](int64_t at) {
        const auto place = static_cast<size_t>(at);
        *to++ = from_sum<T>(sums[place] / shared[place]);
      });
    }
  });
}

}  // namespace chorale::kernel::cpu
