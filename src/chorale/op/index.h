// Picking and placing elements by index. Indices are i64, or i32 where PyTorch takes them too; out of range is
// InvalidArgument, with the index, its position and the bound, and nothing is written then.
#pragma once

#include <initializer_list>
#include <optional>
#include <variant>

#include "chorale/kernel/index_attrs.h"
#include "chorale/op/op_def.h"
#include "chorale/op/view.h"

namespace chorale {

// ---- along one dimension, with a vector of indices (i64 or i32)

// Slices of x at `index`.
Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index);
// x with slices of `source` added (times alpha), copied, or overwritten with a value; added in the order of the index.
Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha = 1);
const Tensor& index_add_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha = 1);
Tensor index_copy(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
const Tensor& index_copy_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);
const Tensor& index_fill_(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);

// ---- along one dimension, with an index (i64) per element; it may be smaller than x in the other dimensions

// result[i][j] = x[index[i][j]][j] for dim 0.
Tensor gather(const Tensor& x, int64_t dim, const Tensor& index);
// The same, with x and index broadcast against each other; without dim, of the flattened tensors.
Tensor take_along_dim(const Tensor& x, const Tensor& index, std::optional<int64_t> dim = {});
// x with x[index[i][j]][j] = source[i][j], or += for scatter_add. Where places are named twice, the last one counts.
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
const Tensor& scatter_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);
const Tensor& scatter_(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);
Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
const Tensor& scatter_add_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);

// ---- Python's brackets: index(x, {0, Slice{1, 3}, kEllipsis, tensor, kNewAxis}) is x[0, 1:3, ..., tensor, None]

struct Slice {
  int64_t start = 0;
  int64_t stop = kEnd;
  int64_t step = 1;
};
enum class IndexMark : uint8_t { kEllipsis, kNewAxis };
inline constexpr IndexMark kEllipsis = IndexMark::kEllipsis;  // as many whole dimensions as fit
inline constexpr IndexMark kNewAxis = IndexMark::kNewAxis;    // a new dimension of size 1

// A number selects, a tensor of i64 picks (several of them broadcast), a bool tensor of k dimensions masks k
// dimensions. Where tensors stand side by side their dimensions take that place in the result, otherwise they come
// first.
using IndexItem = std::variant<int64_t, int, Slice, IndexMark, Tensor>;
using IndexItems = std::initializer_list<IndexItem>;

// A view when there is no tensor among the items.
Tensor index(const Tensor& x, IndexItems items);
// x[items] = values (broadcast), or += with accumulate, where places named twice get both.
Tensor index_put(const Tensor& x, IndexItems items, const Tensor& values, bool accumulate = false);
const Tensor& index_put_(const Tensor& x, IndexItems items, const Tensor& values, bool accumulate = false);

// ---- masks (bool), broadcast against x

// The elements where the mask holds, as a vector.
Tensor masked_select(const Tensor& x, const Tensor& mask);
// x with those elements replaced, in order, by the first ones of `source`.
Tensor masked_scatter(const Tensor& x, const Tensor& mask, const Tensor& source);
// masked_fill (op/pointwise.h) with a value that has a gradient: one element.
Tensor masked_fill(const Tensor& x, const Tensor& mask, const Tensor& value);
// The indices of elements that are not zero: i64 [count, dims].
Tensor nonzero(const Tensor& x);

namespace op {
using kernel::DimBackwardAttrs;
using kernel::FillAttrs;
using kernel::IndexAddAttrs;
using kernel::IndexPutAttrs;

extern const OpDef kIndexSelect, kIndexSelectBackward, kIndexAdd, kIndexCopy, kIndexFill;
extern const OpDef kGather, kGatherBackward, kScatter, kScatterFill, kScatterAdd;
extern const OpDef kIndex, kIndexBackward, kIndexPut;
extern const OpDef kMaskedSelect, kMaskedScatter, kNonzero;
}  // namespace op

}  // namespace chorale
