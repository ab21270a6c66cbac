#include <gtest/gtest.h>

#include <string>

#include "chorale/base/error.h"
#include "chorale/tensor/tensor.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

const Tensor kIndices = Tensor::from({int64_t{0}, int64_t{4}}, {1, 2});
const Tensor kRows = Tensor::from({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}, {2, 3});

std::string refusal(const Tensor& indices, const Tensor& values, const Shape& sizes) {
  return message_of([&] { Tensor::sparse_coo(indices, values, sizes); });
}

TEST(SparseTensor, KeepsItsPartsAndLooksLikeItsShape) {
  const Tensor x = Tensor::sparse_coo(kIndices, kRows, {5, 3}, true);
  EXPECT_TRUE(x.is_sparse());
  EXPECT_EQ(x.sizes(), (Shape{5, 3}));
  EXPECT_EQ(x.elems(), 15);
  EXPECT_EQ(x.dtype(), DType::kF32);
  EXPECT_TRUE(x.sparse().indices.is(kIndices));
  EXPECT_TRUE(x.sparse().values.is(kRows));
  EXPECT_TRUE(x.sparse().coalesced);
  EXPECT_THROW(x.raw(), StateError);
  EXPECT_FALSE(kRows.is_sparse());
}

TEST(SparseTensor, HasNoDenseElements) {
  const Tensor x = Tensor::sparse_coo(kIndices, kRows, {5, 3});
  EXPECT_THROW((void)x.data<float>(), StateError);
  EXPECT_THROW((void)x.to_vector<float>(), StateError);
  EXPECT_THROW(kRows.sparse(), InvalidArgument);
  EXPECT_THROW(x.set_data(kRows), InvalidArgument);
}

TEST(SparseTensor, AnAliasSharesThePartsUnderANewHandle) {
  const Tensor x = Tensor::sparse_coo(kIndices, kRows, {5, 3}, true);
  const Tensor alias = x.alias();
  EXPECT_FALSE(alias.is(x));
  EXPECT_TRUE(alias.sparse().values.is(kRows));
  EXPECT_TRUE(alias.sparse().coalesced);
}

TEST(SparseTensor, MayHaveNoEntriesOrOnlySparseDimensions) {
  const Tensor none =
      Tensor::sparse_coo(Tensor::empty({1, 0}, DType::kI64), Tensor::empty({0, 3}, DType::kF32), {5, 3});
  EXPECT_EQ(none.sizes(), (Shape{5, 3}));
  const Tensor points = Tensor::sparse_coo(Tensor::from({int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}}, {2, 2}),
                                           Tensor::from({1.5, 2.5}, {2}), {4, 4});
  EXPECT_EQ(points.dtype(), DType::kF64);
}

TEST(SparseTensor, PartsThatDoNotFitAreErrorsWithTheirShapes) {
  EXPECT_NE(refusal(kRows, kRows, {5, 3}).find("f32"), std::string::npos);
  EXPECT_NE(refusal(Tensor::from({int64_t{1}}, {1}), kRows, {5, 3}).find("[1]"), std::string::npos);
  EXPECT_NE(refusal(Tensor::from({int64_t{1}}, {1, 1}), kRows, {5, 3}).find("1 indices but values of shape [2, 3]"),
            std::string::npos);
  EXPECT_NE(refusal(kIndices, kRows, {5, 4}).find("[5, 4]"), std::string::npos);
  EXPECT_NE(refusal(kIndices, kRows, {5}).find("1 sparse and 1 dense"), std::string::npos);
  EXPECT_NE(refusal(kIndices, kRows, {-5, 3}).find("[-5, 3]"), std::string::npos);
  EXPECT_NE(refusal(Tensor(), kRows, {5, 3}).find("needs indices"), std::string::npos);
  EXPECT_NE(refusal(kIndices, Tensor(), {5, 3}).find("needs indices"), std::string::npos);
  EXPECT_NE(refusal(kIndices, Tensor::empty({2, 3}, DType::kF32, kNull), {5, 3}).find("null"), std::string::npos);
  EXPECT_NE(refusal(kIndices, Tensor::sparse_coo(kIndices, kRows, {5, 3}), {5, 3}).find("dense"), std::string::npos);
}

}  // namespace
}  // namespace chorale
