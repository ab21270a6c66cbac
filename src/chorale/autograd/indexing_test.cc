// Gradients of views, indexing and joining where a table test of single rows does not look: through several calls, in
// place, and as sparse tensors.
#include <gtest/gtest.h>

#include "chorale/autograd/autograd.h"
#include "chorale/op/functions.h"

namespace chorale {
namespace {

Tensor leaf(const std::vector<float>& values, const Shape& sizes) {
  const Tensor x = Tensor::from(values, sizes);
  set_requires_grad(x);
  return x;
}
Tensor ints(const std::vector<int64_t>& list) { return Tensor::from(list, {static_cast<int64_t>(list.size())}); }
std::vector<float> gradient_of(const Tensor& x) { return gradient(x).to_vector<float>(); }

TEST(IndexingGradient, CatTellsFortyInputsApart) {
  std::vector<Tensor> xs;
  for (int i = 0; i < 40; ++i) {
    xs.push_back(i % 3 == 0 ? Tensor::from({1.0f, 1.0f}, {2}) : leaf({1}, {1}));
  }
  const Tensor y = cat(xs);
  backward(sum(mul(y, arange(y.elems(), DType::kF32))));
  int64_t at = 0;
  for (const Tensor& x : xs) {
    if (requires_grad(x)) {
      EXPECT_EQ(gradient_of(x), std::vector<float>{static_cast<float>(at)});
    }
    at += x.elems();
  }
}

TEST(IndexingGradient, AWriteThroughBracketsSplitsTheGradient) {
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3}), v = leaf({10, 20}, {2});
  const Tensor y = index_put(x, {Slice{}, ints({2, 0})}, v);  // columns 2 and 0
  backward(sum(mul(y, Tensor::from({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}, {2, 3}))));
  EXPECT_EQ(gradient_of(x), (std::vector<float>{0, 2, 0, 0, 5, 0}));
  EXPECT_EQ(gradient_of(v), (std::vector<float>{3 + 6, 1 + 4}));
}

TEST(IndexingGradient, InPlaceFormsAreRecorded) {
  const Tensor x = leaf({1, 2, 3}, {3}), s = leaf({5, 7}, {2});
  const Tensor y = mul(x, 2);
  scatter_add_(y, 0, ints({1, 1}), s);
  index_fill_(y, 0, ints({0}), 9);
  backward(sum(mul(y, y)));  // y = [9, 4 + 12, 6]
  EXPECT_EQ(gradient_of(x), (std::vector<float>{0, 2 * 2 * 16, 2 * 2 * 6}));
  EXPECT_EQ(gradient_of(s), (std::vector<float>{32, 32}));
}

TEST(IndexingGradient, MasksPassItToWhatTheyLetThrough) {
  const Tensor x = leaf({1, 2, 3}, {3}), v = leaf({5}, {});
  const Tensor mask = Tensor::from({true, false, true}, {3});
  backward(sum(mul(masked_fill(x, mask, v), Tensor::from({1.0f, 10.0f, 100.0f}, {3}))));
  EXPECT_EQ(gradient_of(x), (std::vector<float>{0, 10, 0}));
  EXPECT_EQ(gradient_of(v), std::vector<float>{101});
  const Tensor z = leaf({1, 2, 3}, {3});
  backward(sum(square(index(z, {mask}))));
  EXPECT_EQ(gradient_of(z), (std::vector<float>{2, 0, 6}));
}

TEST(IndexingGradient, AsStridedFollowsTheLayoutOfItsInput) {
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3});
  // Columns of x lie 3 apart: the view walks down memory, over places of x's second row too.
  const Tensor y = as_strided(transpose(x, 0, 1), {3, 2}, {1, 1}, 1);  // {2,3} {3,4} {4,5}
  backward(sum(mul(y, Tensor::from({1.0f, 10.0f, 100.0f, 1000.0f, 10000.0f, 100000.0f}, {3, 2}))));
  EXPECT_EQ(gradient_of(x), (std::vector<float>{0, 1, 110, 11000, 100000, 0}));
}

TEST(SparseGradient, OfAnEmbeddingIsTheDenseOne) {
  const Tensor indices = Tensor::from<int32_t>({3, 0, 3, 1}, {2, 2});
  const Tensor weights = Tensor::from({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f}, {2, 2, 2});
  for (std::optional<int64_t> padding : {std::optional<int64_t>{}, std::optional<int64_t>{0}}) {
    const Tensor dense = leaf(std::vector<float>(8, 1), {4, 2}), sparse = leaf(std::vector<float>(8, 1), {4, 2});
    for (int round = 0; round < 2; ++round) {  // the second adds to the first
      backward(sum(mul(embedding(indices, dense, padding), weights)));
      backward(sum(mul(embedding(indices, sparse, padding, true), weights)));
    }
    ASSERT_TRUE(gradient(sparse).is_sparse());
    EXPECT_EQ(to_dense(gradient(sparse)).to_vector<float>(), gradient_of(dense));
    EXPECT_EQ(gradient(sparse).sparse().values.size(0), padding ? 6 : 8);
  }
}

TEST(SparseGradient, MeetsADenseOneAtTheSameLeaf) {
  const Tensor table = leaf({1, 2, 3, 4}, {2, 2});
  backward(add(sum(embedding(ints({1, 1}), table, {}, true)), sum(mul(table, 10))));
  EXPECT_FALSE(gradient(table).is_sparse());
  EXPECT_EQ(gradient_of(table), (std::vector<float>{10, 10, 12, 12}));
  backward(sum(embedding(ints({0}), table, {}, true)));
  EXPECT_EQ(gradient_of(table), (std::vector<float>{11, 11, 12, 12}));
}

TEST(SparseGradient, GoesThroughACast) {
  const Tensor table = leaf({1, 2, 3, 4}, {2, 2});
  backward(sum(embedding(ints({1}), to(table, DType::kF64), {}, true)));
  ASSERT_TRUE(gradient(table).is_sparse());
  EXPECT_EQ(gradient(table).dtype(), DType::kF32);
  EXPECT_EQ(to_dense(gradient(table)).to_vector<float>(), (std::vector<float>{0, 0, 1, 1}));
}

TEST(SparseGradient, GoesToADenseDestination) {
  const Tensor table = leaf({1, 2, 3, 4}, {2, 2});
  const Tensor bucket = zeros({6});
  const Tensor place = view(slice(bucket, 0, 1, 5), {2, 2});
  set_gradient_destination(table, place);
  for (int round = 0; round < 2; ++round) backward(sum(embedding(ints({1}), table, {}, true)));
  EXPECT_EQ(bucket.to_vector<float>(), (std::vector<float>{0, 0, 0, 2, 2, 0}));
}

TEST(SparseGradient, FlowsToTheValues) {
  const Tensor values = leaf({1, 2, 3}, {3});
  const Tensor x = Tensor::sparse_coo(Tensor::from<int64_t>({1, 0, 1}, {1, 3}), values, {2});
  backward(sum(mul(to_dense(coalesce(sparse_scale(x, 3))), Tensor::from({10.0f, 100.0f}, {2}))));
  EXPECT_EQ(gradient_of(values), (std::vector<float>{300, 30, 300}));
}

}  // namespace
}  // namespace chorale
