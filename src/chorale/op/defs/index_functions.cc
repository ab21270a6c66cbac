// The functions of op/index.h.
#include <algorithm>

#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/index.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"

namespace chorale {
namespace {

using namespace op;  // NOLINT(google-build-using-namespace): rows and attributes

// Brackets taken apart: a view for everything that is no tensor, and then a tensor (or none) per dimension of it.
struct Brackets {
  Tensor view;
  Tensors tensors;

  // The dimension of the view that comes next.
  int64_t dim() const { return static_cast<int64_t>(tensors.size()); }
  void keep_whole() { tensors.emplace_back(); }
};

// How many dimensions of x an item uses up.
int64_t dims_of(const IndexItem& item) {
  if (const auto* mark = std::get_if<IndexMark>(&item); mark) return 0;
  if (const auto* tensor = std::get_if<Tensor>(&item); tensor && tensor->dtype() == DType::kBool) return tensor->dims();
  return 1;
}

// A mask as indices: one vector per dimension, of the places where it holds. A mask without dimensions keeps or drops
// all.
void add_mask(const Tensor& mask, Brackets& brackets) {
  const int64_t dim = brackets.dim();
  for (int64_t d = 0; d < mask.dims(); ++d) {
    CHORALE_CHECK(mask.size(d) == brackets.view.size(dim + d), "[index] a mask of shape ", mask.sizes(),
                  " does not fit shape ", brackets.view.sizes(), " from dimension ", dim, " on");
  }
  if (mask.dims() == 0) {
    brackets.view = unsqueeze(brackets.view, dim);
    brackets.tensors.push_back(select(nonzero(reshape(mask, {1})), 1, 0));
    return;
  }
  for (const Tensor& column : unbind(nonzero(mask), 1)) brackets.tensors.push_back(column);
}

Brackets take_apart(const Tensor& x, IndexItems items) {
  int64_t used = 0, ellipses = 0;
  op::need_defined("index", "x", x);
  for (const IndexItem& item : items) {
    if (const auto* tensor = std::get_if<Tensor>(&item)) op::need_defined("index", "an index", *tensor);
    used += dims_of(item);
    ellipses += std::holds_alternative<IndexMark>(item) && std::get<IndexMark>(item) == kEllipsis;
  }
  CHORALE_CHECK(used <= x.dims(), "[index] ", used, " indices for a tensor of shape ", x.sizes());
  CHORALE_CHECK(ellipses <= 1, "[index] only one ellipsis can stand for the dimensions that are left");
  Brackets brackets{x, {}};
  for (const IndexItem& item : items) {
    if (const auto* mark = std::get_if<IndexMark>(&item)) {
      if (*mark == kNewAxis) {
        brackets.view = unsqueeze(brackets.view, brackets.dim());
        brackets.keep_whole();
      } else {
        for (int64_t i = used; i < x.dims(); ++i) brackets.keep_whole();
      }
    } else if (const auto* range = std::get_if<Slice>(&item)) {
      if (range->start != 0 || range->stop != kEnd || range->step != 1) {
        brackets.view = slice(brackets.view, brackets.dim(), range->start, range->stop, range->step);
      }
      brackets.keep_whole();
    } else if (const auto* tensor = std::get_if<Tensor>(&item)) {
      CHORALE_CHECK(tensor->defined(), "[index] an index tensor is undefined");
      if (tensor->dtype() == DType::kBool) {
        add_mask(*tensor, brackets);
      } else {
        brackets.tensors.push_back(*tensor);
      }
    } else {
      const int64_t at = std::holds_alternative<int>(item) ? std::get<int>(item) : std::get<int64_t>(item);
      brackets.view = select(brackets.view, brackets.dim(), at);
    }
  }
  while (!brackets.tensors.empty() && !brackets.tensors.back().defined()) brackets.tensors.pop_back();
  return brackets;
}

Tensors with_values(const Tensor& x, const Tensor& values, const Tensors& indices) {
  Tensors in{x, values};
  in.append(indices.begin(), indices.end());
  return in;
}

}  // namespace

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  return call(kIndexSelect, DimAttrs{dim}, x, index);
}
Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha) {
  return call(kIndexAdd, IndexAddAttrs{dim, alpha}, x, index, source);
}
const Tensor& index_add_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha) {
  return call_into(kIndexAdd, IndexAddAttrs{dim, alpha}, x, x, index, source);
}
Tensor index_copy(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return call(kIndexCopy, DimAttrs{dim}, x, index, source);
}
const Tensor& index_copy_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return call_into(kIndexCopy, DimAttrs{dim}, x, x, index, source);
}
Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  return call(kIndexFill, FillAttrs{dim, value}, x, index);
}
const Tensor& index_fill_(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  return call_into(kIndexFill, FillAttrs{dim, value}, x, x, index);
}

Tensor gather(const Tensor& x, int64_t dim, const Tensor& index) { return call(kGather, DimAttrs{dim}, x, index); }

Tensor take_along_dim(const Tensor& x, const Tensor& index, std::optional<int64_t> dim) {
  op::need_defined("take_along_dim", "x", x);
  op::need_defined("take_along_dim", "index", index);
  if (!dim) return gather(flatten(x), 0, flatten(index));
  CHORALE_CHECK(x.dims() == index.dims() && x.dims() > 0, "[take_along_dim] x of shape ", x.sizes(),
                " and an index of shape ", index.sizes(), " must have the same number of dimensions");
  const auto at = static_cast<size_t>(normalize_dim("take_along_dim", *dim, x.dims()));
  // Broadcast everywhere but along the dimension.
  Shape x_sizes = x.sizes(), index_sizes = index.sizes();
  x_sizes[at] = index_sizes[at] = 1;
  const Shape common = broadcast_shapes("take_along_dim", x_sizes, index_sizes);
  x_sizes = index_sizes = common;
  x_sizes[at] = x.sizes()[at];
  index_sizes[at] = index.sizes()[at];
  return gather(expand(x, x_sizes), *dim, expand(index, index_sizes));
}

Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return call(kScatter, DimAttrs{dim}, x, index, source);
}
const Tensor& scatter_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return call_into(kScatter, DimAttrs{dim}, x, x, index, source);
}
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  return call(kScatterFill, FillAttrs{dim, value}, x, index);
}
const Tensor& scatter_(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  return call_into(kScatterFill, FillAttrs{dim, value}, x, x, index);
}
Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return call(kScatterAdd, DimAttrs{dim}, x, index, source);
}
const Tensor& scatter_add_(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return call_into(kScatterAdd, DimAttrs{dim}, x, x, index, source);
}

Tensor index(const Tensor& x, IndexItems items) {
  const Brackets brackets = take_apart(x, items);
  if (brackets.tensors.empty()) return brackets.view;
  Tensors in{brackets.view};
  in.append(brackets.tensors.begin(), brackets.tensors.end());
  return call_list(kIndex, {}, in);
}

Tensor index_put(const Tensor& x, IndexItems items, const Tensor& values, bool accumulate) {
  op::need_defined("index_put", "x", x);
  op::need_defined("index_put", "values", values);
  const Brackets brackets = take_apart(x, items);
  if (!brackets.tensors.empty() && brackets.view.is(x)) {
    return call_list(kIndexPut, IndexPutAttrs{accumulate}, with_values(x, values, brackets.tensors));
  }
  const Tensor result = clone(x);
  return index_put_(result, items, values, accumulate);
}

const Tensor& index_put_(const Tensor& x, IndexItems items, const Tensor& values, bool accumulate) {
  op::need_defined("index_put_", "x", x);
  op::need_defined("index_put_", "values", values);
  const Brackets brackets = take_apart(x, items);
  if (!brackets.tensors.empty()) {
    current().call_into(kIndexPut, with_values(brackets.view, values, brackets.tensors), IndexPutAttrs{accumulate},
                        {&brackets.view, 1});
  } else if (accumulate) {
    add_(brackets.view, values);
  } else {
    copy_(brackets.view, values);
  }
  return x;
}

Tensor masked_select(const Tensor& x, const Tensor& mask) { return call(kMaskedSelect, {}, x, mask); }
Tensor masked_scatter(const Tensor& x, const Tensor& mask, const Tensor& source) {
  return call(kMaskedScatter, {}, x, mask, source);
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, const Tensor& value) {
  op::need_defined("masked_fill", "value", value);
  op::need_defined("masked_fill", "x", x);
  op::need_defined("masked_fill", "mask", mask);
  CHORALE_CHECK(value.dims() == 0, "[masked_fill] the value must be a scalar, found shape ", value.sizes());
  // What x's dtype cannot hold would wrap around.
  if (kInts.has(x.dtype()) && value.dtype() != x.dtype() && !is_complex(value.dtype()) && value.device() == kCpu &&
      !value.extension()) {
    check_held("masked_fill", x.dtype(),
               is_floating(value.dtype()) ? Scalar(value.item<double>()) : Scalar(value.item<int64_t>()));
  }
  return where(mask, to(value, x.dtype()), x);
}
Tensor nonzero(const Tensor& x) { return call(kNonzero, {}, x); }

}  // namespace chorale
