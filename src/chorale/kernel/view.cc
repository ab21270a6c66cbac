#include "chorale/kernel/view.h"

#include <algorithm>

namespace chorale::kernel {
namespace {

// normalize_dim for ops that need a dimension: a scalar has none.
size_t dim_of(const char* op, int64_t dim, const Shape& sizes) {
  CHORALE_CHECK(!sizes.empty(), "[", op, "] a scalar has no dimension ", dim);
  return static_cast<size_t>(normalize_dim(op, dim, static_cast<int64_t>(sizes.size())));
}

void check_room(const char* op, const Shape& sizes) {
  CHORALE_CHECK(sizes.size() < kMaxDims, "[", op, "] a tensor has at most ", kMaxDims, " dimensions, and ", sizes,
                " has no room for another");
}

int64_t clamp_bound(int64_t at, int64_t size) {
  if (at < 0) at += size;
  return std::clamp<int64_t>(at, 0, size);
}

}  // namespace

View slice_view(View x, const SliceAttrs& attrs) {
  const size_t dim = dim_of("slice", attrs.dim, x.sizes);
  CHORALE_CHECK(attrs.step > 0, "[slice] the step must be positive, not ", attrs.step, "; use flip to go backwards");
  const int64_t size = x.sizes[dim];
  const int64_t start = clamp_bound(attrs.start, size), end = clamp_bound(attrs.end, size);
  x.offset += start * x.strides[dim];
  // Written so that no step, however large, overflows.
  x.sizes[dim] = start < end ? (end - start - 1) / attrs.step + 1 : 0;
  if (x.sizes[dim] > 1) x.strides[dim] *= attrs.step;
  return x;
}

View select_view(View x, const SelectAttrs& attrs) {
  const size_t dim = dim_of("select", attrs.dim, x.sizes);
  const int64_t size = x.sizes[dim];
  CHORALE_CHECK(attrs.index >= -size && attrs.index < size, "[select] index ", attrs.index,
                " is out of range for dimension ", dim, " of size ", size);
  x.offset += (attrs.index < 0 ? attrs.index + size : attrs.index) * x.strides[dim];
  x.sizes.erase(dim);
  x.strides.erase(dim);
  return x;
}

View permute_view(const View& x, const DimsAttrs& attrs) {
  CHORALE_CHECK(attrs.dims.size() == x.sizes.size(), "[permute] a tensor of shape ", x.sizes, " needs ", x.sizes.size(),
                " dimensions, got ", attrs.dims.shape());
  View result{Shape(x.sizes.size()), Strides(x.sizes.size()), x.offset};
  uint32_t seen = 0;
  for (size_t i = 0; i < x.sizes.size(); ++i) {
    const size_t dim = dim_of("permute", attrs.dims[i], x.sizes);
    CHORALE_CHECK(!(seen >> dim & 1u), "[permute] dimension ", dim, " appears twice in ", attrs.dims.shape());
    seen |= 1u << dim;
    result.sizes[i] = x.sizes[dim];
    result.strides[i] = x.strides[dim];
  }
  return result;
}

View expand_view(const View& x, const SizesAttrs& attrs) {
  const Shape to = attrs.sizes.shape();
  CHORALE_CHECK(to.size() >= x.sizes.size(), "[expand] a tensor of shape ", x.sizes, " has more dimensions than ", to);
  const size_t lead = to.size() - x.sizes.size();
  View result{to, Strides(to.size(), 0), x.offset};
  for (size_t i = 0; i < lead; ++i) {
    CHORALE_CHECK(to[i] >= 0, "[expand] size ", to[i], " of the new dimension ", i, " in ", to, " must be given");
  }
  for (size_t i = lead; i < to.size(); ++i) {
    const int64_t size = x.sizes[i - lead];
    CHORALE_CHECK(to[i] == -1 || to[i] == size || (size == 1 && to[i] >= 0), "[expand] shape ", x.sizes,
                  " does not expand to ", to, ": size ", size, " in dimension ", i, " is neither 1 nor ", to[i]);
    if (to[i] == -1 || to[i] == size) {
      result.sizes[i] = size;
      result.strides[i] = x.strides[i - lead];
    }
  }
  return result;
}

Shape resolve_sizes(const char* op, const IntList& sizes, const Shape& from) {
  Shape to = sizes.shape();
  int64_t* unknown = nullptr;
  int64_t known = 1;
  for (int64_t& size : to) {
    if (size == -1) {
      CHORALE_CHECK(!unknown, "[", op, "] only one size may be -1 in ", to);
      unknown = &size;
    } else {
      CHORALE_CHECK(size >= 0, "[", op, "] size ", size, " in ", to, " is negative");
      CHORALE_CHECK(!__builtin_mul_overflow(known, size, &known), "[", op, "] ", to, " has too many elements");
    }
  }
  const int64_t elems = count_elems(from);
  if (unknown) {
    CHORALE_CHECK(known > 0, "[", op, "] the -1 in ", to, " could be any size: a tensor of shape ", from,
                  " has no elements");
    *unknown = elems / known;
    known *= *unknown;
  }
  CHORALE_CHECK(known == elems, "[", op, "] a tensor of shape ", from, " has ", elems, " elements, which do not fit ",
                sizes.shape());
  return to;
}

View reshape_view(const View& x, const SizesAttrs& attrs) {
  View result{resolve_sizes("view", attrs.sizes, x.sizes), {}, x.offset};
  CHORALE_CHECK(view_strides(x.sizes, x.strides, result.sizes, result.strides), "[view] shape ", x.sizes,
                " with strides ", x.strides, " cannot be seen as ", result.sizes,
                " without a copy; use reshape, which copies when it must");
  return result;
}

View squeeze_view(const View& x, const DimsAttrs& attrs) {
  uint32_t gone = 0;
  for (int64_t entry : attrs.dims) {
    const size_t dim = dim_of("squeeze", entry, x.sizes);
    CHORALE_CHECK(x.sizes[dim] == 1, "[squeeze] dimension ", dim, " of shape ", x.sizes, " has not size 1");
    gone |= 1u << dim;
  }
  View result{{}, {}, x.offset};
  for (size_t i = 0; i < x.sizes.size(); ++i) {
    if (gone >> i & 1u) continue;
    result.sizes.push_back(x.sizes[i]);
    result.strides.push_back(x.strides[i]);
  }
  return result;
}

View unsqueeze_view(View x, const DimAttrs& attrs) {
  check_room("unsqueeze", x.sizes);
  const auto dims = static_cast<int64_t>(x.sizes.size());
  const auto dim = static_cast<size_t>(normalize_dim("unsqueeze", attrs.dim, dims + 1));
  // The stride that a contiguous tensor would have, so that contiguous stays contiguous for libraries that look.
  const int64_t stride = dim < x.sizes.size() ? x.sizes[dim] * x.strides[dim] : 1;
  x.sizes.insert(dim, 1);
  x.strides.insert(dim, stride);
  return x;
}

View unfold_view(View x, const UnfoldAttrs& attrs) {
  check_room("unfold", x.sizes);
  CHORALE_CHECK(attrs.step > 0, "[unfold] the step must be positive, not ", attrs.step);
  const auto dim = static_cast<size_t>(normalize_dim("unfold", attrs.dim, static_cast<int64_t>(x.sizes.size())));
  // A scalar is unfolded as if it had one dimension of size 1.
  const bool scalar = x.sizes.empty();
  const int64_t size = scalar ? 1 : x.sizes[dim], stride = scalar ? 1 : x.strides[dim];
  CHORALE_CHECK(attrs.size >= 0 && attrs.size <= size, "[unfold] a window of ", attrs.size,
                " does not fit into dimension ", dim, " of size ", size);
  if (!scalar) {
    x.sizes[dim] = (size - attrs.size) / attrs.step + 1;
    if (x.sizes[dim] > 1) x.strides[dim] *= attrs.step;
  }
  x.sizes.push_back(attrs.size);
  x.strides.push_back(stride);
  return x;
}

View diagonal_view(const View& x, const DiagonalAttrs& attrs) {
  const size_t dim1 = dim_of("diagonal", attrs.dim1, x.sizes), dim2 = dim_of("diagonal", attrs.dim2, x.sizes);
  CHORALE_CHECK(dim1 != dim2, "[diagonal] needs two dimensions, not ", dim1, " twice");
  const int64_t down = std::max<int64_t>(-attrs.offset, 0), right = std::max<int64_t>(attrs.offset, 0);
  const int64_t length = std::max<int64_t>(std::min(x.sizes[dim1] - down, x.sizes[dim2] - right), 0);
  View result{{}, {}, x.offset};
  if (length > 0) result.offset += down * x.strides[dim1] + right * x.strides[dim2];
  for (size_t i = 0; i < x.sizes.size(); ++i) {
    if (i == dim1 || i == dim2) continue;
    result.sizes.push_back(x.sizes[i]);
    result.strides.push_back(x.strides[i]);
  }
  result.sizes.push_back(length);
  result.strides.push_back(x.strides[dim1] + x.strides[dim2]);
  return result;
}

}  // namespace chorale::kernel
