// Views: the same bytes under other sizes, strides and offset. This is the arithmetic; the ops that use it show a
// tensor through a view, and their gradients write through the same view of a tensor of zeros.
#pragma once

#include <limits>

#include "chorale/kernel/attrs.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel {

struct SliceAttrs {
  int64_t dim = 0;
  int64_t start = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
  int64_t step = 1;
};
CHORALE_FIELDS(SliceAttrs, dim, start, end, step)

struct SelectAttrs {
  int64_t dim = 0;
  int64_t index = 0;
};
CHORALE_FIELDS(SelectAttrs, dim, index)

struct DimsAttrs {
  IntList dims;
};
CHORALE_FIELDS(DimsAttrs, dims)

struct DimAttrs {
  int64_t dim = 0;
};
CHORALE_FIELDS(DimAttrs, dim)

struct SizesAttrs {
  IntList sizes;
};
CHORALE_FIELDS(SizesAttrs, sizes)

struct UnfoldAttrs {
  int64_t dim = 0;
  int64_t size = 1;
  int64_t step = 1;
};
CHORALE_FIELDS(UnfoldAttrs, dim, size, step)

struct DiagonalAttrs {
  int64_t offset = 0;
  int64_t dim1 = 0;
  int64_t dim2 = 1;
};
CHORALE_FIELDS(DiagonalAttrs, offset, dim1, dim2)

// `offset` counts from the tensor's own first element, so that the view means the same on another storage.
struct AsStridedAttrs {
  IntList sizes;
  IntList strides;
  int64_t offset = 0;
};
CHORALE_FIELDS(AsStridedAttrs, sizes, strides, offset)

// The gradients of views, which need the sizes of what was viewed.
struct SliceBackwardAttrs {
  IntList sizes;
  int64_t dim = 0;
  int64_t start = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
  int64_t step = 1;
};
CHORALE_FIELDS(SliceBackwardAttrs, sizes, dim, start, end, step)

struct DiagonalBackwardAttrs {
  IntList sizes;
  int64_t offset = 0;
  int64_t dim1 = 0;
  int64_t dim2 = 1;
};
CHORALE_FIELDS(DiagonalBackwardAttrs, sizes, offset, dim1, dim2)

struct UnfoldBackwardAttrs {
  IntList sizes;
  int64_t dim = 0;
  int64_t size = 1;
  int64_t step = 1;
};
CHORALE_FIELDS(UnfoldBackwardAttrs, sizes, dim, size, step)

inline SliceAttrs forward_of(const SliceBackwardAttrs& a) { return {a.dim, a.start, a.end, a.step}; }
inline DiagonalAttrs forward_of(const DiagonalBackwardAttrs& a) { return {a.offset, a.dim1, a.dim2}; }
inline UnfoldAttrs forward_of(const UnfoldBackwardAttrs& a) { return {a.dim, a.size, a.step}; }

struct View {
  Shape sizes;
  Strides strides;
  int64_t offset = 0;

  static View of(const Tensor& x) { return {x.sizes(), x.strides(), x.offset()}; }
  // A contiguous tensor at the start of its storage.
  static View contiguous(const Shape& sizes) { return {sizes, contiguous_strides(sizes), 0}; }
  Tensor on(const Tensor& x) const { return x.view_as(sizes, strides, offset); }
};

// Each throws InvalidArgument, with the values, when the attributes do not fit. Dimensions may be negative.

// Bounds are clamped to the dimension, as Python's are: start past end gives size 0.
View slice_view(View x, const SliceAttrs& attrs);
View select_view(View x, const SelectAttrs& attrs);
View permute_view(const View& x, const DimsAttrs& attrs);
// A size of -1 keeps the dimension; dimensions are added in front.
View expand_view(const View& x, const SizesAttrs& attrs);
// One size may be -1 and is then computed. Throws when the elements do not lie so that strides can describe it.
View reshape_view(const View& x, const SizesAttrs& attrs);
// The sizes with a -1 replaced; throws, naming `op`, when `elems` elements do not fit.
Shape resolve_sizes(const char* op, const IntList& sizes, const Shape& from);
// Every dimension named must have size 1.
View squeeze_view(const View& x, const DimsAttrs& attrs);
View unsqueeze_view(View x, const DimAttrs& attrs);
// Windows of `size` elements, `step` apart, along a dimension; the window becomes the last dimension.
View unfold_view(View x, const UnfoldAttrs& attrs);
View diagonal_view(const View& x, const DiagonalAttrs& attrs);

}  // namespace chorale::kernel
