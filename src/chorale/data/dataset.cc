#include "chorale/data/dataset.h"

#include <cstring>

#include "chorale/op/copy.h"
#include "chorale/op/view.h"

namespace chorale::data {

TensorDataset::TensorDataset(const Tensor& x, const Tensor& y) {
  CHORALE_CHECK(x.defined() && x.dims() > 0, "[TensorDataset] x needs a first dimension that counts the samples");
  CHORALE_CHECK(!y.defined() || (y.dims() > 0 && y.size(0) == x.size(0)), "[TensorDataset] x has ", x.size(0),
                " samples, but y is ", y.sizes());
  x_ = contiguous(x);
  if (y.defined()) y_ = contiguous(y);
}

Example TensorDataset::get(int64_t index) const {
  CHORALE_CHECK(index >= 0 && index < size(), "[TensorDataset] there is no sample ", index, " among ", size());
  return {select(x_, 0, index), y_.defined() ? select(y_, 0, index) : Tensor()};
}

Example TensorDataset::get_batch(std::span<const int64_t> indices) const {
  return {rows_at(x_, indices), y_.defined() ? rows_at(y_, indices) : Tensor()};
}

// The op index_select is not used: there is nothing to differentiate, and the indices are no tensor.
Tensor rows_at(const Tensor& x, std::span<const int64_t> indices) {
  CHORALE_CHECK(x.is_contiguous(), "[rows_at] needs a contiguous tensor");
  Shape sizes = x.sizes();
  const int64_t count = sizes[0];
  sizes[0] = static_cast<int64_t>(indices.size());
  Tensor result = Tensor::empty(sizes, x.dtype());
  const auto row_bytes = indices.empty() ? 0 : static_cast<size_t>(result.elems()) * x.elem_bytes() / indices.size();
  const auto* from = static_cast<const std::byte*>(x.raw());
  auto* to = static_cast<std::byte*>(result.raw());
  for (const int64_t index : indices) {
    CHORALE_CHECK(index >= 0 && index < count, "[rows_at] there is no sample ", index, " among ", count);
    if (row_bytes == 0) continue;
    std::memcpy(to, from + static_cast<size_t>(index) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return result;
}

}  // namespace chorale::data
