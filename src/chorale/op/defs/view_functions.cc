// The functions of op/view.h.
#include <algorithm>

#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using namespace op;  // NOLINT(google-build-using-namespace): rows and attributes

size_t dim_of(const char* name, const Tensor& x, int64_t dim) {
  CHORALE_CHECK(x.dims() > 0, "[", name, "] a scalar has no dimension ", dim);
  return static_cast<size_t>(normalize_dim(name, dim, x.dims()));
}

}  // namespace

Tensor slice(const Tensor& x, int64_t dim, int64_t start, int64_t end, int64_t step) {
  return call(kSlice, SliceAttrs{dim, start, end, step}, x);
}

Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length) {
  op::need_defined("narrow", "x", x);
  const int64_t size = x.sizes()[dim_of("narrow", x, dim)];
  const int64_t first = start < 0 ? start + size : start;
  CHORALE_CHECK(length >= 0 && first >= 0 && first <= size && length <= size - first, "[narrow] ", length,
                " elements from ", start, " do not lie within dimension ", dim, " of size ", size);
  return slice(x, dim, first, first + length);
}

Tensor select(const Tensor& x, int64_t dim, int64_t index) { return call(kSelect, SelectAttrs{dim, index}, x); }
Tensor Tensor::operator[](int64_t i) const { return select(*this, 0, i); }

std::vector<Tensor> split(const Tensor& x, int64_t size, int64_t dim) {
  op::need_defined("split", "x", x);
  const int64_t total = x.sizes()[dim_of("split", x, dim)];
  CHORALE_CHECK(size > 0 || (size == 0 && total == 0), "[split] pieces of size ", size, " cannot cover dimension ", dim,
                " of size ", total);
  std::vector<Tensor> pieces;
  int64_t at = 0;
  do {
    pieces.push_back(slice(x, dim, at, std::min(at + size, total)));
    at += size;
  } while (at < total);
  return pieces;
}

std::vector<Tensor> split_sizes(const Tensor& x, const std::vector<int64_t>& sizes, int64_t dim) {
  op::need_defined("split_sizes", "x", x);
  const int64_t total = x.sizes()[dim_of("split_sizes", x, dim)];
  int64_t sum = 0;
  for (int64_t size : sizes) {
    CHORALE_CHECK(size >= 0, "[split_sizes] size ", size, " is negative");
    sum += size;
  }
  CHORALE_CHECK(sum == total, "[split_sizes] sizes add up to ", sum, ", but dimension ", dim, " has size ", total);
  std::vector<Tensor> pieces;
  int64_t at = 0;
  for (int64_t size : sizes) {
    pieces.push_back(slice(x, dim, at, at + size));
    at += size;
  }
  return pieces;
}

std::vector<Tensor> chunk(const Tensor& x, int64_t chunks, int64_t dim) {
  op::need_defined("chunk", "x", x);
  CHORALE_CHECK(chunks > 0, "[chunk] needs at least one chunk, not ", chunks);
  const int64_t total = x.sizes()[dim_of("chunk", x, dim)];
  // A dimension without elements still gives all its chunks, as PyTorch's does.
  if (total == 0) return split_sizes(x, std::vector<int64_t>(static_cast<size_t>(chunks), 0), dim);
  return split(x, (total + chunks - 1) / chunks, dim);
}

std::vector<Tensor> unbind(const Tensor& x, int64_t dim) {
  op::need_defined("unbind", "x", x);
  const int64_t total = x.sizes()[dim_of("unbind", x, dim)];
  std::vector<Tensor> slices;
  for (int64_t i = 0; i < total; ++i) slices.push_back(select(x, dim, i));
  return slices;
}

Tensor permute(const Tensor& x, const IntList& dims) { return call(kPermute, DimsAttrs{dims}, x); }

Tensor transpose(const Tensor& x, int64_t dim0, int64_t dim1) {
  op::need_defined("transpose", "x", x);
  const int64_t from = normalize_dim("transpose", dim0, x.dims()), to = normalize_dim("transpose", dim1, x.dims());
  DimsAttrs attrs;
  attrs.dims.count = x.dims();
  for (int64_t i = 0; i < x.dims(); ++i) attrs.dims.values[i] = i;
  std::swap(attrs.dims.values[from], attrs.dims.values[to]);
  return call(kPermute, attrs, x);
}
Tensor swapdims(const Tensor& x, int64_t dim0, int64_t dim1) {
  op::need_defined("swapdims", "x", x);
  return transpose(x, dim0, dim1);
}

Tensor t(const Tensor& x) {
  op::need_defined("t", "x", x);
  CHORALE_CHECK(x.dims() <= 2, "[t] needs at most 2 dimensions, found ", x.sizes(), "; use transpose or permute");
  return x.dims() < 2 ? x : transpose(x, 0, 1);
}

Tensor adjoint(const Tensor& x) {
  op::need_defined("adjoint", "x", x);
  CHORALE_CHECK(x.dims() >= 2, "[adjoint] needs a matrix or a batch of them, found shape ", x.sizes());
  const Tensor swapped = transpose(x, -2, -1);
  return is_complex(x.dtype()) ? conj(swapped) : swapped;
}

Tensor movedim(const Tensor& x, const IntList& from, const IntList& to) {
  op::need_defined("movedim", "x", x);
  CHORALE_CHECK(from.size() == to.size(), "[movedim] ", from.size(), " dimensions ", from.shape(), " but ", to.size(),
                " places ", to.shape());
  constexpr int64_t kFree = -1;
  DimsAttrs attrs;
  attrs.dims.count = x.dims();
  std::fill_n(attrs.dims.values, kMaxDims, kFree);
  uint32_t moved = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    const size_t source = dim_of("movedim", x, from[i]), place = dim_of("movedim", x, to[i]);
    CHORALE_CHECK(!(moved >> source & 1u) && attrs.dims.values[place] == kFree,
                  "[movedim] a dimension appears twice in ", from.shape(), " or ", to.shape());
    attrs.dims.values[place] = static_cast<int64_t>(source);
    moved |= 1u << source;
  }
  int64_t next = 0;
  for (int64_t i = 0; i < x.dims(); ++i) {
    if (attrs.dims.values[i] != kFree) continue;
    while (moved >> next & 1u) ++next;
    attrs.dims.values[i] = next++;
  }
  return call(kPermute, attrs, x);
}

Tensor expand(const Tensor& x, const IntList& sizes) {
  op::need_defined("expand", "x", x);
  // Kept sizes are written as -1: the row's sharding labels see from that which dimensions may be split.
  SizesAttrs attrs{sizes};
  const auto dims = static_cast<int64_t>(sizes.size());
  for (int64_t i = std::max<int64_t>(dims - x.dims(), 0); i < dims; ++i) {
    if (attrs.sizes.values[i] == x.sizes()[static_cast<size_t>(i - (dims - x.dims()))]) attrs.sizes.values[i] = -1;
  }
  return call(kExpand, attrs, x);
}
Tensor broadcast_to(const Tensor& x, const IntList& sizes) {
  op::need_defined("broadcast_to", "x", x);
  return expand(x, sizes);
}
Tensor expand_as(const Tensor& x, const Tensor& like) {
  op::need_defined("expand_as", "x", x);
  op::need_defined("expand_as", "like", like);
  return expand(x, like.sizes());
}

Tensor view(const Tensor& x, const IntList& sizes) { return call(kView, SizesAttrs{sizes}, x); }

Tensor reshape(const Tensor& x, const IntList& sizes) {
  op::need_defined("reshape", "x", x);
  if (x.is_contiguous()) return view(x, sizes);
  const Shape to = kernel::resolve_sizes("reshape", sizes, x.sizes());
  Strides unused;
  return view(view_strides(x.sizes(), x.strides(), to, unused) ? x : contiguous(x), to);
}

Tensor flatten(const Tensor& x, int64_t start, int64_t end) {
  op::need_defined("flatten", "x", x);
  if (x.dims() == 0) return reshape(x, {1});
  const size_t first = dim_of("flatten", x, start), last = dim_of("flatten", x, end);
  CHORALE_CHECK(first <= last, "[flatten] start ", start, " comes after end ", end, " in a tensor of shape ",
                x.sizes());
  if (first == last) return x;
  Shape sizes(x.sizes().begin(), x.sizes().begin() + first);
  sizes.push_back(count_elems(std::span(x.sizes().data() + first, last - first + 1)));
  sizes.append(x.sizes().begin() + last + 1, x.sizes().end());
  return reshape(x, sizes);
}

Tensor unflatten(const Tensor& x, int64_t dim, const IntList& sizes) {
  op::need_defined("unflatten", "x", x);
  const size_t at = dim_of("unflatten", x, dim);
  const Shape inner = kernel::resolve_sizes("unflatten", sizes, Shape{x.sizes()[at]});
  Shape to(x.sizes().begin(), x.sizes().begin() + at);
  to.append(inner.begin(), inner.end());
  to.append(x.sizes().begin() + at + 1, x.sizes().end());
  return view(x, to);
}

Tensor squeeze(const Tensor& x) {
  op::need_defined("squeeze", "x", x);
  DimsAttrs attrs;
  for (int64_t i = 0; i < x.dims(); ++i) {
    if (x.sizes()[static_cast<size_t>(i)] == 1) attrs.dims.values[attrs.dims.count++] = i;
  }
  return call(kSqueeze, attrs, x);
}
Tensor squeeze(const Tensor& x, const IntList& dims) {
  op::need_defined("squeeze", "x", x);
  DimsAttrs attrs;
  for (int64_t dim : dims) {
    const int64_t at = normalize_dim("squeeze", dim, x.dims());
    if (x.dims() > 0 && x.sizes()[static_cast<size_t>(at)] == 1) attrs.dims.values[attrs.dims.count++] = at;
  }
  return call(kSqueeze, attrs, x);
}

Tensor unsqueeze(const Tensor& x, int64_t dim) { return call(kUnsqueeze, DimAttrs{dim}, x); }

Tensor unfold(const Tensor& x, int64_t dim, int64_t size, int64_t step) {
  return call(kUnfold, UnfoldAttrs{dim, size, step}, x);
}
Tensor diagonal(const Tensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  return call(kDiagonal, DiagonalAttrs{offset, dim1, dim2}, x);
}
Tensor as_strided(const Tensor& x, const IntList& sizes, const IntList& strides, std::optional<int64_t> offset) {
  op::need_defined("as_strided", "x", x);
  return call(kAsStrided, AsStridedAttrs{sizes, strides, offset.value_or(x.offset()) - x.offset()}, x);
}

Tensor flip(const Tensor& x, const IntList& dims) { return call(kFlip, DimsAttrs{dims}, x); }

}  // namespace chorale
