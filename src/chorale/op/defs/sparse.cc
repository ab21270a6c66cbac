// Sparse tensors: the row that coalesces, and functions over other rows.
#include "chorale/op/sparse.h"

#include "chorale/kernel/cpu/sparse.h"
#include "chorale/op/builder.h"
#include "chorale/op/index.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {

constinit const OpDef kSparseCoalesce{
    .name = "sparse_coalesce",
    .inputs = "values, indices",
    .outputs = 3,  // values, indices, and for each entry where it went
    .attrs = attrs_of<SizesAttrs>,
    .dtypes = kAll,
    .cpu = kernel::cpu::sparse_coalesce,
    .grad = [](const GradArgs& g) -> Tensors {
      return {index_select(g.dout[0], 0, g.out[2]), {}};
    },
    .shard = kReplicateOnly,
    .saves = {.out = {2}},
    .dynamic = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), Tensor::from<int64_t>({2, 0, 2, 1}, {1, 4})}, SizesAttrs{{3}}},
              {{sample({3, 2}), Tensor::from<int64_t>({1, 0, 1, 2, 1, 2}, {2, 3})}, SizesAttrs{{2, 3, 2}}}};
    },
    .formula = "entries of one place added up, places in order",
};

Rows sparse_rows() {
  static constexpr const OpDef* kRows[] = {&kSparseCoalesce};
  return kRows;
}

}  // namespace op

namespace {

void check_shapes(const char* op, const Tensor& x, const Tensor& y) {
  CHORALE_CHECK(x.sizes() == y.sizes() && x.dtype() == y.dtype(), "[", op, "] needs equal shapes and dtypes, found ",
                x.dtype(), " ", x.sizes(), " and ", y.dtype(), " ", y.sizes());
}

// `first`, and then a vector of indices per sparse dimension of x.
Tensors before_indices(std::initializer_list<Tensor> first, const SparseParts& x) {
  Tensors in(first.begin(), first.end());
  for (const Tensor& row : unbind(x.indices, 0)) in.push_back(row);
  return in;
}

}  // namespace

Tensor coalesce(const Tensor& x) {
  op::need_defined("coalesce", "x", x);
  const SparseParts& parts = x.sparse();
  if (parts.coalesced) return x;
  const auto out = op::call_many<3>(op::kSparseCoalesce, op::SizesAttrs{x.sizes()}, parts.values, parts.indices);
  return Tensor::sparse_coo(out[1], out[0], x.sizes(), true);
}

Tensor to_dense(const Tensor& x) {
  op::need_defined("to_dense", "x", x);
  if (!x.is_sparse()) return x;
  // Zeros with the values added at their places: what the gradient of picking them is.
  return op::call_list(op::kIndexBackward, op::SizesAttrs{x.sizes()}, before_indices({x.sparse().values}, x.sparse()));
}

Tensor sparse_add(const Tensor& x, const Tensor& y) {
  op::need_defined("sparse_add", "x", x);
  op::need_defined("sparse_add", "y", y);
  check_shapes("sparse_add", x, y);
  if (!x.is_sparse() && !y.is_sparse()) return add(x, y);
  if (!y.is_sparse()) return sparse_add(y, x);
  const SparseParts& b = y.sparse();
  if (!x.is_sparse()) return op::call_list(op::kIndexPut, op::IndexPutAttrs{true}, before_indices({x, b.values}, b));
  const SparseParts& a = x.sparse();
  CHORALE_CHECK(a.indices.size(0) == b.indices.size(0), "[sparse_add] one tensor has ", a.indices.size(0),
                " sparse dimensions, the other ", b.indices.size(0));
  return Tensor::sparse_coo(cat({a.indices, b.indices}, 1), cat({a.values, b.values}, 0), x.sizes());
}

const Tensor& sparse_add_(const Tensor& dense, const Tensor& sparse) {
  op::need_defined("sparse_add_", "dense", dense);
  op::need_defined("sparse_add_", "sparse", sparse);
  check_shapes("sparse_add_", dense, sparse);
  CHORALE_CHECK(!dense.is_sparse(), "[sparse_add_] adds to a dense tensor in place; use sparse_add for a sparse one");
  const SparseParts& parts = sparse.sparse();
  op::current().call_into(op::kIndexPut, before_indices({dense, parts.values}, parts), op::IndexPutAttrs{true},
                          {&dense, 1});
  return dense;
}

Tensor sparse_scale(const Tensor& x, Scalar factor) {
  op::need_defined("sparse_scale", "x", x);
  const SparseParts& parts = x.sparse();
  return Tensor::sparse_coo(parts.indices, mul(parts.values, factor), x.sizes(), parts.coalesced);
}

}  // namespace chorale
