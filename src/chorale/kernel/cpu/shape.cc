#include "chorale/kernel/cpu/shape.h"

#include <algorithm>

#include "chorale/kernel/around_dim.h"
#include "chorale/kernel/cpu/support/bytes.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/shape_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// Writes each input into its stretch of dimension `dim` of the result. `lengths(x)` is how much it takes up there; a
// stacked input takes 1 and lacks that dimension.
template <class Lengths>
void join(std::span<const Tensor> in, const Tensor& out, int64_t dim, Lengths&& length_of) {
  if (out.elems() == 0) return;
  const Around parts = around(out.sizes(), dim);
  const auto elem = static_cast<int64_t>(out.elem_bytes());
  const int64_t step = parts.length * parts.inner * elem;
  int64_t at = 0;
  for (const Tensor& x : in) {
    const int64_t length = length_of(x);
    if (x.elems() == 0) {
      at += length;
      continue;
    }
    if (x.is_contiguous() && x.dtype() == out.dtype()) {
      const int64_t row = length * parts.inner * elem;
      copy_rows(x.raw(), row, static_cast<std::byte*>(out.raw()) + at * parts.inner * elem, step, row, parts.outer);
    } else {
      View view = View::of(out);
      view.offset += at * view.strides[static_cast<size_t>(dim)];
      if (x.dims() == out.dims()) {
        view.sizes[static_cast<size_t>(dim)] = length;
      } else {
        view.sizes.erase(static_cast<size_t>(dim));
        view.strides.erase(static_cast<size_t>(dim));
      }
      copy_into(x, view.on(out));
    }
    at += length;
  }
}

void triangle(const KernelArgs& args, bool upper) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0]);
  const int64_t rows = out.size(-2), columns = out.size(-1);
  const auto elem = static_cast<int64_t>(out.elem_bytes());
  const int64_t row = columns * elem;
  const int64_t diagonal =
      std::clamp(args.attrs.get<TriangleAttrs>().diagonal, -rows - 1, columns + 1);  // beyond that nothing changes
  const auto* from = static_cast<const std::byte*>(x.raw());
  auto* to = static_cast<std::byte*>(out.raw());
  parallel_for(out.elems() / columns, items_grain(row), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // The lower triangle ends behind the diagonal's element, the upper one begins at it.
      const int64_t cut = std::clamp<int64_t>(i % rows + diagonal + (upper ? 0 : 1), 0, columns) * elem;
      const int64_t first = upper ? cut : 0, last = upper ? row : cut;
      std::memset(to + i * row, 0, static_cast<size_t>(first));
      std::memcpy(to + i * row + first, from + i * row + first, static_cast<size_t>(last - first));
      std::memset(to + i * row + last, 0, static_cast<size_t>(row - last));
    }
  });
}

}  // namespace

void cat(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  const int64_t dim = normalize_dim("cat", args.attrs.get<DimAttrs>().dim, out.dims());
  // An empty vector fits anything and counts for nothing.
  join(args.in, out, dim,
       [&](const Tensor& x) { return x.dims() == out.dims() ? x.sizes()[static_cast<size_t>(dim)] : 0; });
}

void stack(const KernelArgs& args) {
  const int64_t dim = normalize_dim("stack", args.attrs.get<DimAttrs>().dim, args.out[0].dims());
  join(args.in, args.out[0], dim, [](const Tensor&) { return 1; });
}

void roll(const KernelArgs& args) {
  const auto& a = args.attrs.get<RollAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor x = contiguous(args.in[0]);
  const Around parts = around(out.sizes(), normalize_dim("roll", a.dim, out.dims()));
  const int64_t shift = (a.shift % parts.length + parts.length) % parts.length;
  const auto elem = static_cast<int64_t>(out.elem_bytes());
  const int64_t step = parts.length * parts.inner * elem, head = shift * parts.inner * elem;
  const auto* from = static_cast<const std::byte*>(x.raw());
  auto* to = static_cast<std::byte*>(out.raw());
  copy_rows(from, step, to + head, step, step - head, parts.outer);
  copy_rows(from + step - head, step, to, step, head, parts.outer);
}

void tril(const KernelArgs& args) { triangle(args, false); }
void triu(const KernelArgs& args) { triangle(args, true); }

void one_hot(const KernelArgs& args) {
  const int64_t classes = args.attrs.get<OneHotAttrs>().classes;
  const Tensor& out = args.out[0];
  const Tensor index = contiguous(args.in[0], DType::kI64);
  const auto wanted = index.span<const int64_t>();
  for (size_t i = 0; i < wanted.size(); ++i) {
    CHORALE_CHECK(wanted[i] >= 0 && wanted[i] < classes, "[one_hot] class ", wanted[i], " at position ", i,
                  " is out of range: there are ", classes, " classes");
  }
  zero_bytes(out.raw(), out.elems() * static_cast<int64_t>(sizeof(int64_t)));
  auto* to = out.data<int64_t>();
  for (size_t i = 0; i < wanted.size(); ++i) to[static_cast<int64_t>(i) * classes + wanted[i]] = 1;
}

void repeat_interleave(const KernelArgs& args) {
  CHORALE_CHECK(args.in[0].dims() == 1, "[repeat_interleave] repeats must be a vector, found shape ",
                args.in[0].sizes());
  const Tensor repeats = contiguous(args.in[0], DType::kI64);
  int64_t total = 0;
  for (int64_t count : repeats.span<const int64_t>()) {
    CHORALE_CHECK(count >= 0, "[repeat_interleave] a repeat of ", count, " is negative");
    total += count;
  }
  args.out[0] = Tensor::empty({total}, DType::kI64);
  auto* to = args.out[0].data<int64_t>();
  int64_t i = 0;
  for (int64_t count : repeats.span<const int64_t>()) to = std::fill_n(to, count, i++);
}

}  // namespace chorale::kernel::cpu
