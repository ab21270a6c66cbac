#include "chorale/op/embedding.h"

#include "chorale/base/parallel_for.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using testing::HasSubstr;

Tensor ints(const std::vector<int64_t>& list) { return Tensor::from(list, {static_cast<int64_t>(list.size())}); }

TEST(Embedding, TakesRowsOfATable) {
  const Tensor table = iota({3, 2});
  expect_tensor(embedding(ints({2, 0}), table), {2, 2}, {4, 5, 0, 1});
  expect_tensor(embedding(Tensor::from<int32_t>({1, 1, 0, 2}, {2, 2}), table), {2, 2, 2}, {2, 3, 2, 3, 0, 1, 4, 5});
  expect_tensor(embedding(Tensor::from<int64_t>({1}, {}), t(iota({2, 3}))), {2}, {1, 4});
  expect_tensor(embedding(ints({}), table), {0, 2}, {});
}

TEST(Embedding, GradientAddsRowsAndLeavesThePaddingOut) {
  const Tensor dy = iota({4, 2}, 1.0f);
  const auto backward = [&](int64_t padding, const Tensor& indices) {
    return op::call(op::kEmbeddingBackward, op::EmbeddingBackwardAttrs{3, padding}, dy, indices);
  };
  expect_tensor(backward(kNoPadding, ints({2, 0, 2, 2})), {3, 2}, {3, 4, 0, 0, 1 + 5 + 7, 2 + 6 + 8});
  expect_tensor(backward(2, Tensor::from<int32_t>({2, 0, 2, 1}, {4})), {3, 2}, {3, 4, 7, 8, 0, 0});
}

TEST(Embedding, GradientSumsSixteenBitTypesInF32) {
  // 256 + 1 rounds back to 256 in bf16.
  std::vector<bfloat16> list(9, bfloat16(1));
  list[0] = bfloat16(256);
  const Tensor dx = op::call(op::kEmbeddingBackward, op::EmbeddingBackwardAttrs{1, kNoPadding},
                             Tensor::from(list, {9, 1}), ints(std::vector<int64_t>(9, 0)));
  EXPECT_EQ(values(dx), std::vector<double>{264});
}

TEST(Embedding, GradientIsTheSameWithManyThreads) {
  constexpr int64_t kRows = 50, kColumns = 300, kCount = 2000;
  std::vector<int64_t> rows(kCount);
  std::vector<float> gradients(kCount * kColumns);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i * 2654435761u % kRows);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = 1.0f / static_cast<float>(i + 1);
  const Tensor dy = Tensor::from(gradients, {kCount, kColumns});
  const auto backward = [&] {
    return values(op::call(op::kEmbeddingBackward, op::EmbeddingBackwardAttrs{kRows, 3}, dy, ints(rows)));
  };
  const int before = thread_count();
  set_thread_count(1);
  const auto one = backward();
  set_thread_count(4);
  EXPECT_EQ(backward(), one);
  set_thread_count(before);
}

TEST(EmbeddingBag, SumsMeansAndMaxima) {
  const Tensor table = Tensor::from({1.0f, 8.0f, 2.0f, 4.0f, 3.0f, 0.0f}, {3, 2});
  const Tensor indices = ints({0, 2, 1, 1, 2}), offsets = ints({0, 2, 2});  // {0, 2}, {}, {1, 1, 2}
  const auto bag = [&](BagMode mode, std::optional<int64_t> padding = {}) {
    return embedding_bag(indices, table, offsets, {.mode = mode, .padding = padding});
  };
  expect_tensor(bag(BagMode::kSum), {3, 2}, {4, 8, 0, 0, 7, 8});
  expect_tensor(bag(BagMode::kMax), {3, 2}, {3, 8, 0, 0, 3, 4});
  expect_tensor(bag(BagMode::kMean, 1), {3, 2}, {2, 4, 0, 0, 3, 0});
  expect_tensor(bag(BagMode::kMax, -1), {3, 2}, {1, 8, 0, 0, 2, 4});
  expect_tensor(embedding_bag(indices, table, offsets, {.mode = BagMode::kSum, .weights = iota({5})}), {3, 2},
                {3, 0, 0, 0, 22, 20});
  expect_tensor(embedding_bag(indices, table, ints({0, 3, 5}), {.mode = BagMode::kSum, .include_last_offset = true}),
                {2, 2}, {6, 12, 5, 4});
  expect_tensor(embedding_bag(Tensor::from<int64_t>({0, 2, 1, 1}, {2, 2}), table), {2, 2}, {2, 4, 2, 4});
}

TEST(Embedding, SaysWhatIsOutOfRange) {
  const Tensor table = iota({3, 2});
  EXPECT_THAT(message_of([&] {
                embedding(Tensor::from<int64_t>({0, 3}, {1, 2}), table);
              }),
              HasSubstr("[embedding] index 3 at position [0, 1] is out of range: dimension 0 has size 3"));
  EXPECT_THAT(message_of([&] { embedding(ints({-1}), table); }), HasSubstr("index -1"));
  EXPECT_THAT(message_of([&] { embedding(ints({0}), table, 3); }), HasSubstr("the padding row 3 is out of range"));
  EXPECT_THAT(message_of([&] { embedding(iota({1}), table); }), HasSubstr("not f32"));
  EXPECT_THAT(message_of([&] { embedding(ints({0}), iota({3})); }), HasSubstr("must be a matrix"));
  EXPECT_THAT(message_of([&] { embedding_bag(ints({0, 3}), table, ints({0})); }), HasSubstr("index 3 at position [1]"));
  EXPECT_THAT(message_of([&] {
                embedding_bag(ints({0, 1}), table, ints({1}));
              }),
              HasSubstr("must begin with 0, not 1"));
  EXPECT_THAT(message_of([&] {
                embedding_bag(ints({0, 1}), table, ints({0, 3}));
              }),
              HasSubstr("offset 3 at position 1"));
  EXPECT_THAT(message_of([&] {
                embedding_bag(ints({0, 1}), table, ints({0, 1}), {.include_last_offset = true});
              }),
              HasSubstr("the last offset is 1, but there are 2 indices"));
  EXPECT_THAT(message_of([&] {
                embedding_bag(ints({0, 1}), table, ints({0}), {.weights = iota({2})});
              }),
              HasSubstr("only a sum can be weighted"));
}

}  // namespace
}  // namespace chorale
