// Views: tensors that show another's bytes under other sizes and strides. Nothing is copied, and writes to either are
// seen through both. The exceptions, which may copy, say so: reshape, flatten, unflatten, adjoint (of complex), flip.
// Dimensions and indices may be negative and then count from the end.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "chorale/kernel/view.h"
#include "chorale/op/op_def.h"

namespace chorale {

// The end of a slice that goes to the end of its dimension.
inline constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

// x[start:end:step] along `dim`; bounds are clamped as Python's are, and step is positive.
Tensor slice(const Tensor& x, int64_t dim, int64_t start = 0, int64_t end = kEnd, int64_t step = 1);
// `length` elements from `start`; all of them must exist.
Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length);
// One element of a dimension, which disappears.
Tensor select(const Tensor& x, int64_t dim, int64_t index);
// Pieces of `size` along `dim`; the last may be smaller.
std::vector<Tensor> split(const Tensor& x, int64_t size, int64_t dim = 0);
// Pieces of the given sizes, which must add up.
std::vector<Tensor> split_sizes(const Tensor& x, const std::vector<int64_t>& sizes, int64_t dim = 0);
// Cuts x into at most `chunks` pieces of equal size, the last perhaps smaller.
std::vector<Tensor> chunk(const Tensor& x, int64_t chunks, int64_t dim = 0);
// All the slices along `dim`, which disappears.
std::vector<Tensor> unbind(const Tensor& x, int64_t dim = 0);

// Dimension i of the result is dimension dims[i] of x.
Tensor permute(const Tensor& x, const IntList& dims);
// Two dimensions exchanged; `swapdims` is another name for it.
Tensor transpose(const Tensor& x, int64_t dim0, int64_t dim1);
Tensor swapdims(const Tensor& x, int64_t dim0, int64_t dim1);
// The transpose of a matrix; of a vector or scalar, itself.
Tensor t(const Tensor& x);
// The last two dimensions exchanged, and conjugated (a copy) where x is complex.
Tensor adjoint(const Tensor& x);
// Dimensions moved to other places; the others keep their order.
Tensor movedim(const Tensor& x, const IntList& from, const IntList& to);

// Repeats dimensions of size 1, and adds dimensions in front; -1 keeps a size. `broadcast_to` is another name for it.
Tensor expand(const Tensor& x, const IntList& sizes);
Tensor broadcast_to(const Tensor& x, const IntList& sizes);
Tensor expand_as(const Tensor& x, const Tensor& like);

// The same elements under another shape; one size may be -1. InvalidArgument when only a copy could do it.
Tensor view(const Tensor& x, const IntList& sizes);
// A view where possible, else a copy.
Tensor reshape(const Tensor& x, const IntList& sizes);
// Dimensions `start` to `end`, inclusive, become one.
Tensor flatten(const Tensor& x, int64_t start = 0, int64_t end = -1);
// One dimension becomes several; one size may be -1.
Tensor unflatten(const Tensor& x, int64_t dim, const IntList& sizes);
// Drops all dimensions of size 1, or those named that have size 1.
Tensor squeeze(const Tensor& x);
Tensor squeeze(const Tensor& x, const IntList& dims);
// Adds a dimension of size 1 in front of `dim`.
Tensor unsqueeze(const Tensor& x, int64_t dim);

// Windows of `size` elements, `step` apart, along `dim`; the window is the last dimension of the result.
Tensor unfold(const Tensor& x, int64_t dim, int64_t size, int64_t step);
// The diagonal of two dimensions, as the last one; offset > 0 lies above the main diagonal.
Tensor diagonal(const Tensor& x, int64_t offset = 0, int64_t dim1 = 0, int64_t dim2 = 1);
// Any sizes and strides over x's storage, which they must not leave. `offset` counts from the start of the storage; by
// default it is x's own.
Tensor as_strided(const Tensor& x, const IntList& sizes, const IntList& strides,
                  std::optional<int64_t> offset = std::nullopt);

// A copy with dimensions reversed.
Tensor flip(const Tensor& x, const IntList& dims);

namespace op {
using kernel::AsStridedAttrs;
using kernel::DiagonalAttrs;
using kernel::DimAttrs;
using kernel::DimsAttrs;
using kernel::SelectAttrs;
using kernel::SizesAttrs;
using kernel::SliceAttrs;
using kernel::UnfoldAttrs;

extern const OpDef kDetach, kSlice, kSelect, kPermute, kExpand, kView, kSqueeze, kUnsqueeze, kUnfold, kDiagonal,
    kAsStrided;
extern const OpDef kFlip;
// Gradients of views: zeros of the viewed shape, with the gradient added through the view.
extern const OpDef kSliceBackward, kDiagonalBackward, kUnfoldBackward, kAsStridedBackward;
}  // namespace op

}  // namespace chorale
