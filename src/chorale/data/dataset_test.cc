#include "chorale/data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/data/loader.h"
#include "chorale/data/token_windows.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/random.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace mine {  // a program's own example type

struct Ragged {
  chorale::Tensor tokens;
};
struct RaggedBatch {
  std::vector<int64_t> lengths;
};
RaggedBatch collate(const std::vector<Ragged>& examples) {
  RaggedBatch batch;
  for (const Ragged& example : examples) batch.lengths.push_back(example.tokens.elems());
  return batch;
}

}  // namespace mine

namespace chorale::data {
namespace {

using Numbers = std::vector<int64_t>;

// Row i of x is i, 10 i; y is -i.
TensorDataset rows(int64_t count) {
  const Tensor i = arange(count);
  return TensorDataset(stack({i, mul(i, 10)}, 1), neg(i));
}

TEST(Collate, StacksTensorsAndNumbersPartByPart) {
  using Part = std::tuple<Tensor, int64_t, std::array<float, 2>>;
  const std::vector<Part> examples = {{Tensor::from({1, 2}, {2}), 7, {1, 2}}, {Tensor::from({3, 4}, {2}), 8, {3, 4}}};
  const auto [tensors, numbers, pairs] = collate(examples);
  EXPECT_EQ(tensors.sizes(), (Shape{2, 2}));
  EXPECT_EQ(tensors.to_vector<int>(), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(numbers.dtype(), DType::kI64);
  EXPECT_EQ(numbers.to_vector<int>(), (std::vector<int>{7, 8}));
  EXPECT_EQ(pairs[1].to_vector<float>(), (std::vector<float>{2, 4}));
}

TEST(Collate, NamesTheExampleThatDoesNotFit) {
  const auto error_of = [](const std::vector<Tensor>& parts) -> std::string {
    return message_of([&] { collate(parts); });
  };
  const Tensor two = Tensor::from({1.f, 2.f}, {2});
  EXPECT_THAT(error_of({two, two, Tensor::from({1.f}, {1})}),
              testing::HasSubstr("example 2 of the batch is f32 [1], but the first is f32 [2]"));
  EXPECT_THAT(error_of({two, Tensor::from({1, 2}, {2})}), testing::HasSubstr("example 1 of the batch is i32 [2]"));
  EXPECT_THAT(error_of({two, Tensor()}), testing::HasSubstr("1 of 2 tensors are undefined"));
  EXPECT_FALSE(collate(std::vector<Tensor>(2)).defined());
}

TEST(Collate, CanBeOverloadedBesideAProgramsType) {
  struct Lengths {
    int64_t size() const { return 3; }
    mine::Ragged get(int64_t index) const { return {zeros({index})}; }
  };
  DataLoader loader(Lengths{}, {.batch_size = 3});
  EXPECT_EQ(loader.next()->lengths, (Numbers{0, 1, 2}));
}

TEST(TensorDataset, BatchesAreTheExamplesStacked) {
  const TensorDataset dataset = rows(5);
  const Numbers indices = {4, 0, 4};
  const Example batch = dataset.get_batch(indices);
  EXPECT_EQ(batch.x.sizes(), (Shape{3, 2}));
  EXPECT_EQ(batch.x.to_vector<int>(), (std::vector<int>{4, 40, 0, 0, 4, 40}));
  EXPECT_EQ(batch.y.to_vector<int>(), (std::vector<int>{-4, 0, -4}));
  EXPECT_EQ(dataset.get(3).x.to_vector<int>(), (std::vector<int>{3, 30}));
  EXPECT_EQ(dataset.get(3).y.item<int>(), -3);
  EXPECT_THROW(dataset.get(5), InvalidArgument);
  EXPECT_THROW(dataset.get_batch(Numbers{-1}), InvalidArgument);
}

TEST(TensorDataset, TakesViewsAndNoLabels) {
  const TensorDataset dataset(transpose(Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3}), 0, 1));
  EXPECT_EQ(dataset.size(), 3);
  EXPECT_EQ(dataset.get_batch(Numbers{2, 0}).x.to_vector<int>(), (std::vector<int>{3, 6, 1, 4}));
  EXPECT_FALSE(dataset.get_batch(Numbers{0}).y.defined());
  EXPECT_THROW(TensorDataset(zeros({3}), zeros({2})), InvalidArgument);
  EXPECT_THROW(TensorDataset(zeros({})), InvalidArgument);
  EXPECT_EQ(TensorDataset(zeros({2, 0})).get_batch(Numbers{1}).x.sizes(), (Shape{1, 0}));
}

TEST(Mapped, AppliesAFunctionWithTheSamplesOwnNumbers) {
  const auto augment = [](const Example& e, Generator& rng) {
    return Example{add(to(e.x, DType::kF32), uniform({2}, 0, 1, DType::kF32, rng)), e.y};
  };
  const auto run = [&](int workers) {
    DataLoader loader(Mapped(rows(8), augment), {.batch_size = 8, .workers = workers, .seed = 2});
    return loader.next()->x.to_vector<float>();
  };
  EXPECT_EQ(run(0), run(2));
  EXPECT_NE(run(0)[0], 0);
  DataLoader plain(Mapped(rows(2), [](const Example& e) { return neg(e.x); }), {.batch_size = 2});
  EXPECT_EQ(plain.next()->to_vector<int>(), (std::vector<int>{0, 0, -1, -10}));
}

TEST(Subset, SplitsAtRandomWithoutLosingASample) {
  const auto dataset = std::make_shared<const TensorDataset>(rows(10));
  const auto parts = random_split(dataset, {7, 3}, 1);
  ASSERT_EQ(parts.size(), 2u);
  Numbers seen;
  for (const auto& part : parts) {
    DataLoader loader(part, {.batch_size = 2});
    for (const auto& [x, y] : loader) {
      for (const int64_t value : y.to_vector<int64_t>()) seen.push_back(-value);
    }
  }
  EXPECT_NE(seen, SequentialSampler(10).indices(0));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, SequentialSampler(10).indices(0));
  EXPECT_THROW(random_split(dataset, {7, 4}, 1), InvalidArgument);
  EXPECT_THROW(Subset(dataset, {10}), InvalidArgument);
  EXPECT_THROW(parts[1].get_batch(Numbers{3}), InvalidArgument);
}

TEST(TokenWindows, ShowsATextAndTheSameOneTokenLater) {
  const TokenWindows windows(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6}, 3);
  ASSERT_EQ(windows.size(), 2);
  const Example batch = windows.get_batch(Numbers{1, 0});
  EXPECT_EQ(batch.x.sizes(), (Shape{2, 3}));
  EXPECT_EQ(batch.x.to_vector<int>(), (std::vector<int>{3, 4, 5, 0, 1, 2}));
  EXPECT_EQ(batch.y.to_vector<int>(), (std::vector<int>{4, 5, 6, 1, 2, 3}));
  EXPECT_EQ(windows.get(1).y.to_vector<int>(), (std::vector<int>{4, 5, 6}));
  EXPECT_THROW(windows.get(2), InvalidArgument);
  EXPECT_EQ(TokenWindows(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6}, 3, 1).size(), 4);
  EXPECT_EQ(TokenWindows(std::vector<int32_t>{0, 1, 2}, 3).size(), 0);
  EXPECT_EQ(TokenWindows(std::vector<int32_t>{0, 1, 2, 3}, 3).size(), 1);
}

TEST(TokenWindows, ReadsShardsAndBytes) {
  const TemporaryFolder folder;
  io::save_token_shard(folder / "a.bin", std::vector<uint16_t>{50256, 1, 65535});
  EXPECT_EQ(TokenWindows(io::TokenShard(folder / "a.bin"), 2).get(0).y.to_vector<int>(), (std::vector<int>{1, 65535}));
  const TokenWindows text(io::MappedFile::open(folder.write("a.txt", "ab\xff")), 2);
  EXPECT_EQ(text.get(0).x.to_vector<int>(), (std::vector<int>{'a', 'b'}));
  EXPECT_EQ(text.get(0).y.to_vector<int>(), (std::vector<int>{'b', 255}));
}

}  // namespace
}  // namespace chorale::data
