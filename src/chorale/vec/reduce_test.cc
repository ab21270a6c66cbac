#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "chorale/vec/loops.h"
#include "chorale/vec/scalar_reduce.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

constexpr ReduceOp kAllReduceOps[kReduceOpCount] = {ReduceOp::kSum,    ReduceOp::kProd,       ReduceOp::kMax,
                                                    ReduceOp::kMin,    ReduceOp::kSumSquares, ReduceOp::kSumAbs,
                                                    ReduceOp::kMaxAbs, ReduceOp::kMinAbs,     ReduceOp::kSumNonZero,
                                                    ReduceOp::kAny,    ReduceOp::kAll};
constexpr int64_t kSizes[] = {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1000, 5000};

// Small integers in every dtype, about a third of them zero: sums are exact, so that the order cannot matter. Where
// products are taken, most are ones.
template <class T>
std::vector<Stored<T>> small_values(int64_t n, bool near_one) {
  std::mt19937 random(3);
  std::vector<Stored<T>> values;
  for (int64_t i = 0; i < n; ++i) {
    int x = static_cast<int>(random() % 3) - (std::is_unsigned_v<T> ? 0 : 1);
    if (near_one) x = i % 100 == 7 ? 2 : 1;
    if constexpr (std::is_same_v<T, bool>) {
      values.push_back(x != 0 ? 1 : 0);
    } else if constexpr (kIsComplex<T>) {
      // Magnitudes 0, 5 and 10 are integers too.
      using Real = typename T::value_type;
      values.push_back(near_one ? T(static_cast<Real>(x), 0) : T(static_cast<Real>(3 * x), static_cast<Real>(4 * x)));
    } else if constexpr (kIsHalf<T>) {
      values.push_back(T(static_cast<float>(x)));
    } else {
      values.push_back(static_cast<T>(x));
    }
  }
  return values;
}

// Calls body(op as constant, T()) for every pair.
template <class Body>
void for_each_reduction(Body body) {
  for_each_target([&](const char* target) {
#define CHORALE_TEST_OP(name)                                                                               \
  for (DType dtype : kAllDTypes) {                                                                          \
    visit_dtype(dtype, [&](auto tag) {                                                                      \
      using T = typename decltype(tag)::type;                                                               \
      SCOPED_TRACE(concat(target, " " #name " ", dtype));                                                   \
      if constexpr (is_defined(ReduceOp::name, dtype_of<T>)) body.template operator()<ReduceOp::name, T>(); \
    });                                                                                                     \
  }
    CHORALE_FOR_EACH_REDUCE_OP(CHORALE_TEST_OP)
#undef CHORALE_TEST_OP
  });
}

TEST(Reduce, RowsOfAnyLengthFoldIntoTheAccumulator) {
  for_each_reduction([]<ReduceOp kOp, class T>() {
    using Reduce = ScalarReduce<kOp, T>;
    for (int64_t n : kSizes) {
      const auto values = small_values<T>(n, kOp == ReduceOp::kProd);
      auto expected = Reduce::identity();
      for (auto x : values) expected = Reduce::step(expected, x);
      typename Reduce::Acc acc;
      reduce_identity(kOp, dtype_of<T>, &acc);
      // The row is reduced in two pieces, which must chain.
      reduce_row(kOp, dtype_of<T>)(values.data(), n / 3, &acc);
      reduce_row(kOp, dtype_of<T>)(values.data() + n / 3, n - n / 3, &acc);
      ASSERT_EQ(acc, expected) << n;
    }
  });
}

TEST(Reduce, ColumnsFoldIntoTheAccumulatorRow) {
  for_each_reduction([]<ReduceOp kOp, class T>() {
    using Reduce = ScalarReduce<kOp, T>;
    using Acc = typename Reduce::Acc;
    constexpr int64_t kShapes[][2] = {{0, 5}, {1, 1}, {3, 17}, {16, 64}, {70, 33}, {200, 5}, {130, 2100}};
    for (const auto& [rows, n] : kShapes) {
      const int64_t stride = n + 3;
      const auto values = small_values<T>(rows * stride, kOp == ReduceOp::kProd);
      std::vector<Acc> expected(static_cast<size_t>(n), Reduce::identity()), acc = expected;
      acc.resize(acc.size() + 2, Acc(55));  // must stay
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < n; ++j) {
          Acc& e = expected[static_cast<size_t>(j)];
          e = Reduce::step(e, values[static_cast<size_t>(r * stride + j)]);
        }
      }
      reduce_columns(kOp, dtype_of<T>)(values.data(), stride * static_cast<int64_t>(sizeof(T)), rows, n, acc.data());
      for (size_t j = 0; j < expected.size(); ++j) ASSERT_EQ(acc[j], expected[j]) << rows << " x " << n << " at " << j;
      ASSERT_EQ(acc[expected.size()], Acc(55));
      ASSERT_EQ(acc[expected.size() + 1], Acc(55));
    }
  });
}

TEST(Reduce, PartialResultsCombine) {
  for_each_reduction([]<ReduceOp kOp, class T>() {
    using Reduce = ScalarReduce<kOp, T>;
    using Acc = typename Reduce::Acc;
    for (int64_t n : {0, 1, 5, 33}) {
      std::vector<Acc> acc, partial, expected;
      for (int64_t i = 0; i < n; ++i) {
        acc.push_back(static_cast<Acc>(static_cast<float>(i % 2)));
        partial.push_back(static_cast<Acc>(static_cast<float>(i % 3 == 0)));
        expected.push_back(Reduce::combine(acc.back(), partial.back()));
      }
      reduce_combine(kOp, dtype_of<T>)(partial.data(), n, acc.data());
      ASSERT_EQ(acc, expected);
    }
  });
}

TEST(Reduce, AccumulatorsAreAsDocumented) {
  EXPECT_EQ(accumulator_of(ReduceOp::kSum, DType::kBF16), DType::kF32);
  EXPECT_EQ(accumulator_of(ReduceOp::kSum, DType::kU8), DType::kI64);
  EXPECT_EQ(accumulator_of(ReduceOp::kSum, DType::kBool), DType::kI64);
  EXPECT_EQ(accumulator_of(ReduceOp::kMax, DType::kU8), DType::kU8);
  EXPECT_EQ(accumulator_of(ReduceOp::kMax, DType::kF16), DType::kF32);
  EXPECT_EQ(accumulator_of(ReduceOp::kSumSquares, DType::kC64), DType::kF32);
  EXPECT_EQ(accumulator_of(ReduceOp::kSum, DType::kC128), DType::kC128);
  EXPECT_EQ(accumulator_of(ReduceOp::kAny, DType::kF64), DType::kBool);
  EXPECT_EQ(accumulator_of(ReduceOp::kSumNonZero, DType::kF32), DType::kI64);
}

TEST(Reduce, LargestOfNegativeIntegersAndOfNothing) {
  for_each_target([](const char*) {
    const std::vector<int16_t> values = {-5, -7, -30000};
    int16_t acc;
    reduce_identity(ReduceOp::kMax, DType::kI16, &acc);
    EXPECT_EQ(acc, -32768);
    reduce_row(ReduceOp::kMax, DType::kI16)(values.data(), 3, &acc);
    EXPECT_EQ(acc, -5);
    reduce_identity(ReduceOp::kMin, DType::kI16, &acc);
    reduce_row(ReduceOp::kMin, DType::kI16)(values.data(), 3, &acc);
    EXPECT_EQ(acc, -30000);
    float nothing;
    reduce_identity(ReduceOp::kMax, DType::kF32, &nothing);
    EXPECT_EQ(nothing, -std::numeric_limits<float>::infinity());
  });
}

TEST(Reduce, NanWinsAtAnyPlace) {
  for_each_target([](const char* target) {
    for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kMaxAbs, ReduceOp::kMinAbs, ReduceOp::kSum}) {
      for (size_t place = 0; place < 300; ++place) {
        std::vector<float> values(300);
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 150;
        values[place] = std::numeric_limits<float>::quiet_NaN();
        float acc;
        reduce_identity(op, DType::kF32, &acc);
        reduce_row(op, DType::kF32)(values.data(), 300, &acc);
        ASSERT_TRUE(std::isnan(acc)) << target << " " << static_cast<int>(op) << " " << place;
        // Seen as 30 rows of 10 columns, it changes only its own column.
        std::vector<float> columns(10);
        for (float& c : columns) reduce_identity(op, DType::kF32, &c);
        reduce_columns(op, DType::kF32)(values.data(), 40, 30, 10, columns.data());
        for (size_t j = 0; j < 10; ++j) ASSERT_EQ(std::isnan(columns[j]), j == place % 10) << target;
      }
    }
  });
}

// A sum in order would be off by up to 0.5e6 ulp; a tree of depth d by at most d times the sum of magnitudes.
TEST(Reduce, ErrorOfAMillionTermsStaysWithinAFewUlp) {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  constexpr int64_t kCount = 1'000'000;
  std::vector<float> values(kCount);
  for (float& x : values) x = uniform(random);
  double exact = 0;
  for (float x : values) exact += static_cast<double>(x);
  for_each_target([&](const char* target) {
    float row = 0, column = 0, squares = 0;
    reduce_row(ReduceOp::kSum, DType::kF32)(values.data(), kCount, &row);
    reduce_columns(ReduceOp::kSum, DType::kF32)(values.data(), 4, kCount, 1, &column);
    EXPECT_NEAR(row, exact, exact * 3e-7) << target;
    EXPECT_NEAR(column, exact, exact * 1e-6) << target;
    reduce_row(ReduceOp::kSumSquares, DType::kF32)(values.data(), kCount, &squares);
    EXPECT_NEAR(squares, kCount / 3.0, kCount * 1e-3) << target;
  });
}

TEST(Reduce, SixteenBitInputsAreSummedInF32) {
  for_each_target([](const char* target) {
    // 70000 terms of 1: bf16 itself would stop at 256, f16 at 2048.
    const std::vector<bfloat16> brain(70000, bfloat16(1.0f));
    const std::vector<float16> half(70000, float16(1.0f));
    float sum = 0;
    reduce_row(ReduceOp::kSum, DType::kBF16)(brain.data(), 70000, &sum);
    EXPECT_EQ(sum, 70000.0f) << target;
    sum = 0;
    reduce_row(ReduceOp::kSum, DType::kF16)(half.data(), 70000, &sum);
    EXPECT_EQ(sum, 70000.0f) << target;
  });
}

TEST(Reduce, ComplexHasNoExtremum) {
  for (ReduceOp op : kAllReduceOps) {
    const bool exists = op != ReduceOp::kMax && op != ReduceOp::kMin;
    EXPECT_EQ(reduce_row(op, DType::kC64) != nullptr, exists);
    EXPECT_EQ(reduce_columns(op, DType::kC64) != nullptr, exists);
  }
}

}  // namespace
}  // namespace chorale::vec
