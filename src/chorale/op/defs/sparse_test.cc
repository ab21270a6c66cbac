#include "chorale/op/sparse.h"

#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/pointwise.h"

namespace chorale {
namespace {

using testing::HasSubstr;

// Rows 2, 0, 2 of a [3, 2] tensor.
Tensor rows_twice() { return Tensor::sparse_coo(Tensor::from<int64_t>({2, 0, 2}, {1, 3}), iota({3, 2}, 1.0f), {3, 2}); }

TEST(Sparse, CoalesceSortsAndAddsUp) {
  const Tensor x = coalesce(rows_twice());
  expect_tensor(x.sparse().indices, {1, 2}, {0, 2});
  expect_tensor(x.sparse().values, {2, 2}, {3, 4, 1 + 5, 2 + 6});
  EXPECT_TRUE(x.sparse().coalesced);
  EXPECT_TRUE(coalesce(x).is(x));
  expect_tensor(to_dense(x), {3, 2}, {3, 4, 0, 0, 6, 8});
}

TEST(Sparse, CoalesceOrdersSeveralDimensions) {
  const Tensor x =
      Tensor::sparse_coo(Tensor::from<int64_t>({1, 0, 1, 0, 2, 1, 2, 0}, {2, 4}), iota<double>({4}, 1), {2, 3});
  const Tensor y = coalesce(x);  // (1,2) (0,1) (1,2) (0,0)
  expect_tensor(y.sparse().indices, {2, 3}, {0, 0, 1, 0, 1, 2});
  expect_tensor(y.sparse().values, {3}, {4, 2, 4});
  expect_tensor(to_dense(x), {2, 3}, {4, 2, 0, 0, 0, 4});
}

TEST(Sparse, WorksWithoutEntries) {
  const Tensor none =
      Tensor::sparse_coo(Tensor::empty({1, 0}, DType::kI64), Tensor::empty({0, 2}, DType::kF32), {3, 2});
  expect_tensor(to_dense(none), {3, 2}, {0, 0, 0, 0, 0, 0});
  EXPECT_EQ(coalesce(none).sparse().values.sizes(), (Shape{0, 2}));
  expect_tensor(to_dense(sparse_add(none, rows_twice())), {3, 2}, {3, 4, 0, 0, 6, 8});
}

TEST(Sparse, AddsInEveryCombination) {
  const Tensor x = rows_twice(), dense = iota({3, 2});
  EXPECT_EQ(sparse_add(x, x).sparse().values.size(0), 6);
  expect_tensor(to_dense(sparse_add(x, x)), {3, 2}, {6, 8, 0, 0, 12, 16});
  expect_tensor(sparse_add(dense, x), {3, 2}, {3, 5, 2, 3, 10, 13});
  expect_tensor(sparse_add(x, dense), {3, 2}, {3, 5, 2, 3, 10, 13});
  expect_tensor(sparse_add(dense, dense), {3, 2}, {0, 2, 4, 6, 8, 10});
  EXPECT_TRUE(sparse_add_(dense, x).is(dense));
  expect_tensor(dense, {3, 2}, {3, 5, 2, 3, 10, 13});
  expect_tensor(to_dense(sparse_scale(x, 2)), {3, 2}, {6, 8, 0, 0, 12, 16});
}

TEST(Sparse, SaysWhatDoesNotFit) {
  const Tensor x = rows_twice();
  EXPECT_THAT(message_of([&] { add(x, x); }), HasSubstr("[add] takes dense tensors, and input 0 is sparse"));
  EXPECT_THAT(message_of([&] { sparse_add(x, iota({2, 2})); }), HasSubstr("equal shapes and dtypes"));
  const Tensor beyond = Tensor::sparse_coo(Tensor::from<int64_t>({0, 3}, {1, 2}), iota({2, 2}), {3, 2});
  EXPECT_THAT(message_of([&] { coalesce(beyond); }),
              HasSubstr("index 3 at position [1] is out of range: dimension 0 has size 3"));
  EXPECT_THAT(message_of([&] { to_dense(beyond); }), HasSubstr("index 3 at position [1]"));
}

}  // namespace
}  // namespace chorale
