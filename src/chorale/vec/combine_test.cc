#include "chorale/vec/combine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "chorale/vec/scalar_reduce.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

constexpr int64_t kSizes[] = {0, 1, 3, 16, 17, 100, 5000};

template <class T>
std::vector<std::vector<T>> combined(Reduce op, std::vector<std::vector<T>> in, size_t destinations,
                                     double factor = 1) {
  std::vector<const void*> sources;
  sources.reserve(in.size());
  for (auto& x : in) sources.push_back(x.data());
  // The first destinations are sources themselves, as in an all-reduce in place.
  std::vector<std::vector<T>> extra(destinations, std::vector<T>(in[0].size()));
  std::vector<void*> to;
  for (size_t d = 0; d < destinations; ++d) to.push_back(d < in.size() ? in[d].data() : extra[d].data());
  combine(op, dtype_of<T>, sources, to, static_cast<int64_t>(in[0].size()), factor);
  for (size_t d = 0; d < std::min(destinations, in.size()); ++d) extra[d] = in[d];
  return extra;
}

// The tree, by its definition: the left branch takes the largest power of two below the number of leaves.
float tree_sum(std::span<const float> leaves) {
  if (leaves.size() == 1) return leaves[0];
  size_t left = 1;
  while (2 * left < leaves.size()) left *= 2;
  return tree_sum(leaves.first(left)) + tree_sum(leaves.subspan(left));
}

TEST(Combine, FloatSumsFollowTheTreeForAnyNumberOfSources) {
  for_each_target([](const char* target) {
    for (size_t sources : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 13u, 128u}) {
      for (int64_t n : kSizes) {
        SCOPED_TRACE(concat(target, " ", sources, " sources of ", n));
        std::vector<std::vector<float>> in(sources);
        for (size_t r = 0; r < sources; ++r) {
          for (int64_t i = 0; i < n; ++i)
            in[r].push_back(1.0f / static_cast<float>(3 + 7 * r + static_cast<size_t>(i)));
        }
        std::vector<float> expected;
        for (int64_t i = 0; i < n; ++i) {
          std::vector<float> leaves;
          leaves.reserve(in.size());
          for (const auto& x : in) leaves.push_back(x[static_cast<size_t>(i)]);
          expected.push_back(tree_sum(leaves));
        }
        for (size_t destinations : {size_t{1}, sources}) {
          for (const auto& out : combined(Reduce::kSum, in, destinations)) ASSERT_EQ(out, expected);
        }
      }
    }
  });
}

TEST(Combine, SixteenBitSumsAreFormedInF32AndRoundedOnce) {
  // 2048 + 1 + 1 is 2050 in f32; rounding to f16 after each addition would stay at 2048.
  const auto half = [](float x) { return float16(x); };
  const auto out = combined<float16>(Reduce::kSum, {{half(2048)}, {half(1)}, {half(1)}}, 1);
  EXPECT_EQ(static_cast<float>(out[0][0]), 2050.0f);
  const auto mean = combined<float16>(Reduce::kAverage, {{half(60000)}, {half(60000)}}, 1);
  EXPECT_EQ(static_cast<float>(mean[0][0]), static_cast<float>(half(60000)));
}

template <class T>
void expect_integers(Reduce op, T expected, std::vector<T> values) {
  for (int64_t n : kSizes) {
    std::vector<std::vector<T>> in;
    in.reserve(values.size());
    for (T v : values) in.emplace_back(n, v);
    for (const auto& out : combined(op, in, values.size()))
      ASSERT_EQ(out, std::vector<T>(static_cast<size_t>(n), expected));
  }
}

TEST(Combine, IntegersOfEverySizeAndOperation) {
  for_each_target([](const char* target) {
    SCOPED_TRACE(target);
    expect_integers<int64_t>(Reduce::kSum, 1'000'000'000'006, {1'000'000'000'000, 5, 1});
    expect_integers<int8_t>(Reduce::kSum, -126, {127, 3});  // wraps around
    expect_integers<uint8_t>(Reduce::kProduct, 24, {2, 3, 4});
    expect_integers<int16_t>(Reduce::kMin, -7, {5, -7, 9});
    expect_integers<int32_t>(Reduce::kMax, 9, {5, -7, 9});
    expect_integers<int32_t>(Reduce::kBitAnd, 0b1000, {0b1100, 0b1010});
    expect_integers<int32_t>(Reduce::kBitOr, 0b1110, {0b1100, 0b1010});
    expect_integers<int64_t>(Reduce::kBitXor, 0b0110, {0b1100, 0b1010});
  });
}

TEST(Combine, BoolStaysBool) {
  const uint8_t a[] = {0, 0, 1, 1}, b[] = {0, 1, 0, 1};
  uint8_t out[4];
  const void* in[] = {a, b};
  void* to[] = {out};
  const auto expect = [&](Reduce op, const std::vector<uint8_t>& expected) {
    combine(op, DType::kBool, in, to, 4);
    EXPECT_EQ(std::vector<uint8_t>(out, out + 4), expected);
  };
  expect(Reduce::kSum, {0, 1, 1, 1});
  expect(Reduce::kMax, {0, 1, 1, 1});
  expect(Reduce::kProduct, {0, 0, 0, 1});
  expect(Reduce::kMin, {0, 0, 0, 1});
  expect(Reduce::kBitXor, {0, 1, 1, 0});
}

TEST(Combine, FloatExtremaProductsFactorsAndComplexSums) {
  for_each_target([](const char* target) {
    SCOPED_TRACE(target);
    EXPECT_EQ(combined<double>(Reduce::kMin, {{1, 5}, {3, -2}}, 1)[0], (std::vector<double>{1, -2}));
    EXPECT_EQ(combined<double>(Reduce::kProduct, {{1, 5}, {3, -2}, {2, 2}}, 1)[0], (std::vector<double>{6, -20}));
    EXPECT_EQ(combined<float>(Reduce::kSum, {{1, 5}, {3, -2}}, 2, 0.5)[1], (std::vector<float>{2, 1.5}));
    EXPECT_EQ(combined<float>(Reduce::kAverage, {{1, 5}, {3, -2}}, 2)[1], (std::vector<float>{2, 1.5}));
    EXPECT_EQ(combined<complex64>(Reduce::kSum, {{{2, 3}}, {{10, 11}}, {{10, 11}}}, 3)[2],
              (std::vector<complex64>{{22, 25}}));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(combined<float>(Reduce::kMax, {{1}, {nan}, {3}}, 1)[0][0])) << "NaN wins";
  });
}

TEST(Combine, WhatMakesNoSenseIsSaid) {
  EXPECT_FALSE(can_combine(Reduce::kMax, DType::kC64));
  EXPECT_FALSE(can_combine(Reduce::kBitOr, DType::kF32));
  EXPECT_FALSE(can_combine(Reduce::kAverage, DType::kI32));
  EXPECT_TRUE(can_combine(Reduce::kAverage, DType::kC128));
  EXPECT_TRUE(can_combine(Reduce::kBitAnd, DType::kBool));
}

}  // namespace
}  // namespace chorale::vec
