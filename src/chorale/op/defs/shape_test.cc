#include "chorale/op/shape.h"

#include "chorale/base/parallel_for.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using testing::HasSubstr;

TEST(Cat, JoinsAlongADimension) {
  const Tensor a = iota({2, 2}), b = iota({2, 1}, 10.0f);
  expect_tensor(cat({a, b}, 1), {2, 3}, {0, 1, 10, 2, 3, 11});
  expect_tensor(cat({a, t(b)}, 0), {3, 2}, {0, 1, 2, 3, 10, 11});
  expect_tensor(cat({a, a}, -2), {4, 2}, {0, 1, 2, 3, 0, 1, 2, 3});
  expect_tensor(cat({iota({0, 2}), a}, 0), {2, 2}, {0, 1, 2, 3});
  expect_tensor(cat({iota({0}), a, iota({0})}, 1), {2, 2}, {0, 1, 2, 3});  // an empty vector fits anything
  expect_tensor(cat({iota({0}), iota({0})}), {0}, {});
}

TEST(Cat, PromotesDtypes) {
  const Tensor mixed = cat({iota<int32_t>({2}), iota<double>({1}, 7)});
  EXPECT_EQ(mixed.dtype(), DType::kF64);
  expect_tensor(mixed, {3}, {0, 1, 7});
  EXPECT_EQ(cat({Tensor::from({true}, {1}), iota<uint8_t>({2})}).dtype(), DType::kU8);
}

TEST(Cat, AgreesWithIndexArithmeticOverRandomShapesAndLayouts) {
  RandomShapes random(11);
  for (int round = 0; round < 100; ++round) {
    const Shape sizes = random.shape();
    const auto dim = static_cast<size_t>(random.pick(0, static_cast<int64_t>(sizes.size()) - 1));
    std::vector<Tensor> xs;
    std::vector<std::pair<size_t, int64_t>> owner;  // by index along dim: which input, and where in it
    for (int64_t i = random.pick(1, 40); i > 0; --i) {
      Shape own = sizes;
      own[dim] = random.pick(0, 3);
      std::swap(own[0], own.back());
      const Tensor x = transpose(iota<double>(own, static_cast<double>(1000 * i)), 0, -1);
      for (int64_t k = 0; k < x.sizes()[dim]; ++k) owner.emplace_back(xs.size(), k);
      xs.push_back(random.pick(0, 1) ? x : build(x.sizes(), [&](const Shape& index) { return at(x, index); }));
    }
    Shape joined = sizes;
    joined[dim] = static_cast<int64_t>(owner.size());
    expect_equal(cat(xs, static_cast<int64_t>(dim)), build(joined, [&](Shape index) {
                   const auto [which, where] = owner[static_cast<size_t>(index[dim])];
                   index[dim] = where;
                   return at(xs[which], index);
                 }));
  }
}

TEST(Cat, IsTheSameWithManyThreads) {
  const int before = thread_count();
  const Tensor a = iota({3, 70000}), b = iota({3, 50001});
  set_thread_count(1);
  const Tensor one = cat({a, b}, 1);
  set_thread_count(3);
  expect_equal(cat({a, b}, 1), one);
  set_thread_count(before);
}

TEST(Cat, SaysWhatDoesNotFit) {
  EXPECT_THAT(message_of([] {
                cat({iota({2, 2}), iota({3, 3})}, 0);
              }),
              HasSubstr("input 1 of shape [3, 3] does not fit [2, 2]"));
  EXPECT_THAT(message_of([] { cat({iota({2}), iota({2, 1})}, 0); }), HasSubstr("does not fit"));
  EXPECT_THAT(message_of([] { cat({iota({}), iota({})}, 0); }), HasSubstr("use stack"));
  EXPECT_THAT(message_of([] { cat({iota({2})}, 1); }), HasSubstr("dimension 1 is out of range"));
  EXPECT_THAT(message_of([] { cat(std::span<const Tensor>{}); }), HasSubstr("at least one"));
}

TEST(Stack, AddsADimension) {
  const Tensor a = iota({2}), b = iota({2}, 5.0f);
  expect_tensor(stack({a, b}), {2, 2}, {0, 1, 5, 6});
  expect_tensor(stack({a, b}, -1), {2, 2}, {0, 5, 1, 6});
  expect_tensor(stack({iota({}), iota({}, 3.0f)}), {2}, {0, 3});
  expect_tensor(stack({slice(iota({4}), 0, 0, 4, 2), iota<float>({2})}, 1), {2, 2}, {0, 0, 2, 1});
  EXPECT_EQ(stack({iota<int32_t>({1}), iota<float>({1})}).dtype(), DType::kF32);
  EXPECT_THAT(message_of([&] { stack({a, iota({3})}); }), HasSubstr("input 1 has shape [3], the first has [2]"));
}

TEST(Repeat, CopiesBlocks) {
  const Tensor x = iota({2, 2});
  expect_tensor(repeat(x, {1, 2}), {2, 4}, {0, 1, 0, 1, 2, 3, 2, 3});
  expect_tensor(repeat(x, {2, 1}), {4, 2}, {0, 1, 2, 3, 0, 1, 2, 3});
  expect_tensor(repeat(iota({2}), {2, 2}), {2, 4}, {0, 1, 0, 1, 0, 1, 0, 1});
  expect_tensor(repeat(x, {0, 3}), {0, 6}, {});
  EXPECT_NE(repeat(x, {1, 1}).storage(), x.storage());
  expect_tensor(tile(x, {2}), {2, 4}, {0, 1, 0, 1, 2, 3, 2, 3});
  expect_tensor(tile(iota({1}), {2, 1, 2}), {2, 1, 2}, {0, 0, 0, 0});
  EXPECT_THAT(message_of([&] { repeat(x, {2}); }), HasSubstr("use tile"));
  EXPECT_THAT(message_of([&] { repeat(x, {2, -1}); }), HasSubstr("a repeat of -1"));
}

TEST(RepeatInterleave, RepeatsElementsInPlace) {
  const Tensor x = iota({2, 2});
  expect_tensor(repeat_interleave(x, 2), {8}, {0, 0, 1, 1, 2, 2, 3, 3});
  expect_tensor(repeat_interleave(x, 2, 0), {4, 2}, {0, 1, 0, 1, 2, 3, 2, 3});
  expect_tensor(repeat_interleave(x, 2, -1), {2, 4}, {0, 0, 1, 1, 2, 2, 3, 3});
  expect_tensor(repeat_interleave(x, Tensor::from<int64_t>({0, 3}, {2}), 1), {2, 3}, {1, 1, 1, 3, 3, 3});
  expect_tensor(repeat_interleave(x, Tensor::from<int32_t>({1}, {1}), 0), {2, 2}, {0, 1, 2, 3});
  expect_tensor(repeat_interleave(x, Tensor::from<int64_t>({1, 0, 0, 2}, {4})), {3}, {0, 3, 3});
  EXPECT_THAT(message_of([&] {
                repeat_interleave(x, Tensor::from<int64_t>({1, -2}, {2}), 0);
              }),
              HasSubstr("a repeat of -2"));
  EXPECT_THAT(message_of([&] { repeat_interleave(x, Tensor::from<int64_t>({1, 2, 3}, {3}), 0); }), HasSubstr("size 2"));
}

TEST(Pad, FillsReflectsAndReplicates) {
  const Tensor x = iota({4});
  expect_tensor(pad(x, {1, 2}, PadMode::kConstant, 9), {7}, {9, 0, 1, 2, 3, 9, 9});
  expect_tensor(pad(x, {-1, -2}), {1}, {1});
  expect_tensor(pad(x, {-1, 1}), {4}, {1, 2, 3, 0});
  expect_tensor(pad(x, {3, 2}, PadMode::kReflect), {9}, {3, 2, 1, 0, 1, 2, 3, 2, 1});
  expect_tensor(pad(x, {2, 1}, PadMode::kReplicate), {7}, {0, 0, 0, 1, 2, 3, 3});
  const Tensor m = iota({2, 2});
  expect_tensor(pad(m, {0, 1, 1, 0}), {3, 3}, {0, 0, 0, 0, 1, 0, 2, 3, 0});
  expect_tensor(pad(m, {1, 0, 0, 1}, PadMode::kReflect), {3, 3}, {1, 0, 1, 3, 2, 3, 1, 0, 1});
  expect_tensor(pad(m, {0, 0, 1, 0}, PadMode::kReplicate), {3, 2}, {0, 1, 0, 1, 2, 3});
  expect_tensor(pad(iota({0}), {1, 1}, PadMode::kConstant, 4), {2}, {4, 4});
  expect_tensor(pad(m, {}), {2, 2}, {0, 1, 2, 3});
}

TEST(Pad, AgreesWithIndexArithmeticOverRandomShapes) {
  RandomShapes random(12);
  for (int round = 0; round < 300; ++round) {
    const Tensor x = transpose(iota<double>(random.shape(), 1), 0, -1);
    const auto mode = static_cast<PadMode>(random.pick(0, 2));
    std::vector<int64_t> pads;
    Shape sizes = x.sizes();
    for (int64_t d = x.dims() - 1; d >= 0 && random.pick(0, 3) > 0; --d) {
      const int64_t size = x.size(d);
      const int64_t most = mode == PadMode::kReflect ? size - 1 : size == 0 && mode == PadMode::kReplicate ? 0 : 3;
      if (most < 0) break;
      pads.push_back(mode == PadMode::kConstant && size > 0 ? random.pick(-1, 3) : random.pick(0, most));
      pads.push_back(random.pick(0, most));
      sizes[static_cast<size_t>(d)] += pads[pads.size() - 2] + pads.back();
    }
    const Tensor expected = build(sizes, [&](Shape index) {
      for (size_t k = 0; k < pads.size() / 2; ++k) {
        const size_t d = sizes.size() - 1 - k;
        const int64_t size = x.sizes()[d];
        int64_t& i = index[d];
        i -= pads[2 * k];
        if (mode == PadMode::kReplicate) i = std::clamp<int64_t>(i, 0, size - 1);
        if (mode == PadMode::kReflect) i = i < 0 ? -i : i >= size ? 2 * (size - 1) - i : i;
        if (i < 0 || i >= size) return -7.0;
      }
      return at(x, index);
    });
    const Tensor y = pad(x, pads, mode, -7);
    expect_equal(y, expected);
    // Its gradient is its transpose.
    if (mode == PadMode::kConstant) continue;
    const Tensor dy = iota<double>(y.sizes(), 1);
    const Tensor dx = op::call(op::kPadBackward, op::PadAttrs{pads, mode, 0}, dy);
    ASSERT_EQ(dx.sizes(), x.sizes());
    const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
      return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    };
    EXPECT_EQ(dot(values(y), values(dy)), dot(values(x), values(dx)));
  }
}

TEST(Pad, SaysWhatDoesNotFit) {
  const Tensor x = iota({3});
  EXPECT_THAT(message_of([&] { pad(x, {1}); }), HasSubstr("must be pairs"));
  EXPECT_THAT(message_of([&] { pad(x, {1, 1, 1, 1}); }), HasSubstr("at most the 1 dimensions"));
  EXPECT_THAT(message_of([&] {
                pad(x, {3, 0}, PadMode::kReflect);
              }),
              HasSubstr("pads 3 and 0 are too wide for size 3"));
  EXPECT_THAT(message_of([&] { pad(x, {-1, 0}, PadMode::kReplicate); }), HasSubstr("only constant padding can crop"));
  EXPECT_THAT(message_of([&] { pad(x, {-2, -2}); }), HasSubstr("crop more than there is"));
  EXPECT_THAT(message_of([&] { pad(iota({0}), {1, 0}, PadMode::kReplicate); }), HasSubstr("nothing to repeat"));
}

TEST(Roll, GoesAroundTheEnd) {
  expect_tensor(roll(iota({5}), 2), {5}, {3, 4, 0, 1, 2});
  expect_tensor(roll(iota({5}), -7, 0), {5}, {2, 3, 4, 0, 1});
  expect_tensor(roll(iota({2, 3}), 1), {2, 3}, {5, 0, 1, 2, 3, 4});
  expect_tensor(roll(iota({2, 3}), {1, 1}, {0, 1}), {2, 3}, {5, 3, 4, 2, 0, 1});
  expect_tensor(roll(t(iota({2, 2})), 1, 0), {2, 2}, {1, 3, 0, 2});
  expect_tensor(roll(iota({0, 2}), 1, 0), {0, 2}, {});
  expect_tensor(roll(iota({}), 3), {}, {0});
  EXPECT_THAT(message_of([] { roll(iota({2}), {1, 2}, {0}); }), HasSubstr("2 shifts [1, 2] but 1 dimensions"));
}

TEST(Triangle, KeepsOneSideOfADiagonal) {
  const Tensor x = iota({3, 3}, 1.0f);
  expect_tensor(tril(x), {3, 3}, {1, 0, 0, 4, 5, 0, 7, 8, 9});
  expect_tensor(triu(x), {3, 3}, {1, 2, 3, 0, 5, 6, 0, 0, 9});
  expect_tensor(tril(t(x), -1), {3, 3}, {0, 0, 0, 2, 0, 0, 3, 6, 0});
  expect_tensor(triu(iota({2, 1, 2}, 1.0f), 1), {2, 1, 2}, {0, 2, 0, 4});
  expect_tensor(tril(x, std::numeric_limits<int64_t>::max()), {3, 3}, values(x));
  expect_tensor(triu(x, std::numeric_limits<int64_t>::max()), {3, 3}, std::vector<double>(9, 0));
  EXPECT_THAT(message_of([] { tril(iota({3})); }), HasSubstr("needs a matrix"));
}

TEST(Meshgrid, SpansAGridWithoutCopies) {
  const Tensor a = iota({2}), b = iota({3}, 10.0f);
  const auto ij = meshgrid({a, b});
  expect_tensor(ij[0], {2, 3}, {0, 0, 0, 1, 1, 1});
  expect_tensor(ij[1], {2, 3}, {10, 11, 12, 10, 11, 12});
  EXPECT_EQ(ij[0].storage(), a.storage());
  const auto xy = meshgrid({a, b}, Indexing::kXY);
  expect_tensor(xy[0], {3, 2}, {0, 1, 0, 1, 0, 1});
  expect_tensor(xy[1], {3, 2}, {10, 10, 11, 11, 12, 12});
}

TEST(OneHot, MarksEachClass) {
  const Tensor index = Tensor::from<int64_t>({2, 0}, {2});
  expect_tensor(one_hot(index, 3), {2, 3}, {0, 0, 1, 1, 0, 0});
  EXPECT_EQ(one_hot(index, 4).dtype(), DType::kI64);
  expect_tensor(one_hot(Tensor::from<int32_t>({1}, {}), 2), {2}, {0, 1});
  EXPECT_THAT(message_of([&] { one_hot(index, 2); }),
              HasSubstr("class 2 at position 0 is out of range: there are 2 classes"));
  EXPECT_THAT(message_of([&] { one_hot(iota({2}), 2); }), HasSubstr("not defined for f32"));
}

}  // namespace
}  // namespace chorale
