#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "chorale/vec/loops.h"
#include "chorale/vec/scalar_reduce.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

constexpr int64_t kSizes[] = {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1000, 5000};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
std::vector<T> random_row(int64_t n, double scale = 3, double shift = 0) {
  std::mt19937 random(static_cast<uint32_t>(n));
  std::normal_distribution<double> normal(shift, scale);
  std::vector<T> values(static_cast<size_t>(n));
  for (T& x : values) x = static_cast<T>(normal(random));
  return values;
}

template <class T>
double tolerance() {
  return 40 * static_cast<double>(std::numeric_limits<T>::epsilon());
}

template <class T>
void test_softmax() {
  for_each_target([](const char* target) {
    for (int64_t n : kSizes) {
      const std::vector<T> x = random_row<T>(n);
      long double largest = -kInfinity, sum = 0;
      for (T v : x) largest = std::max<long double>(largest, v);
      for (T v : x) sum += std::exp(v - largest);
      std::vector<T> y(x.size()), log_y = x;
      softmax_row(x.data(), y.data(), n);
      log_softmax_row(log_y.data(), log_y.data(), n);  // in-place
      const MaxSumExp<T> parts = max_sum_exp(x.data(), n);
      EXPECT_EQ(parts.max, static_cast<T>(largest));
      EXPECT_NEAR(parts.sum, static_cast<double>(sum), static_cast<double>(sum) * tolerance<T>()) << target << " " << n;
      const std::vector<T> dy = random_row<T>(n + 1);
      std::vector<T> dx(x.size()), log_dx(x.size());
      softmax_backward_row(dy.data(), y.data(), dx.data(), n);
      log_softmax_backward_row(dy.data(), log_y.data(), log_dx.data(), n);
      long double dot = 0, total = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        dot += dy[i] * std::exp(x[i] - largest) / sum;
        total += dy[i];
      }
      for (size_t i = 0; i < x.size(); ++i) {
        const auto p = static_cast<double>(std::exp(x[i] - largest) / sum);
        ASSERT_NEAR(y[i], p, tolerance<T>() * p) << target << " " << n;
        ASSERT_NEAR(log_y[i], std::log(p), tolerance<T>() * 20) << target << " " << n;
        ASSERT_NEAR(dx[i], p * (dy[i] - static_cast<double>(dot)), tolerance<T>() * 10) << target << " " << n;
        ASSERT_NEAR(log_dx[i], dy[i] - p * static_cast<double>(total), tolerance<T>() * 100) << target << " " << n;
      }
    }
  });
}
TEST(Softmax, RowsAndTheirGradientsF32) { test_softmax<float>(); }
TEST(Softmax, RowsAndTheirGradientsF64) { test_softmax<double>(); }

TEST(Softmax, HugeValuesDoNotOverflowAndInfinitiesAreMasks) {
  for_each_target([](const char*) {
    std::vector<float> x = {1e30f, 1e30f, -std::numeric_limits<float>::infinity(), 0};
    softmax_row(x.data(), x.data(), 4);
    EXPECT_EQ(x, (std::vector<float>{0.5f, 0.5f, 0, 0}));
    const float masked[3] = {-std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity()};
    float y[3];
    softmax_row(masked, y, 3);
    EXPECT_TRUE(std::isnan(y[0]));
    const MaxSumExp<float> nothing = max_sum_exp(masked, 3);
    EXPECT_EQ(std::log(nothing.sum) + nothing.max, -std::numeric_limits<float>::infinity());
    const float infinite[2] = {1, std::numeric_limits<float>::infinity()};
    const MaxSumExp<float> all = max_sum_exp(infinite, 2);
    EXPECT_EQ(std::log(all.sum) + all.max, std::numeric_limits<float>::infinity());
  });
}

template <class T>
void test_moments() {
  for_each_target([](const char* target) {
    for (int64_t n : kSizes) {
      // A mean far larger than the deviation is where one-pass formulas fail.
      const std::vector<T> x = random_row<T>(n, 1, 1000);
      long double mean = 0, variance = 0;
      for (T v : x) mean += v;
      mean /= static_cast<long double>(n);
      for (T v : x) variance += (v - mean) * (v - mean);
      variance /= static_cast<long double>(n);
      const Moments<T> m = moments(x.data(), n);
      EXPECT_NEAR(m.mean, static_cast<double>(mean), 1000 * tolerance<T>()) << target << " " << n;
      EXPECT_NEAR(m.variance, static_cast<double>(variance), 1e4 * tolerance<T>() * (n == 1 ? 0.01 : 0.1))
          << target << " " << n;

      const std::vector<T> weight = random_row<T>(n, 1), bias = random_row<T>(n, 2);
      for (int variant = 0; variant < 4; ++variant) {
        const T* w = (variant & 1) != 0 ? weight.data() : nullptr;
        const T* b = (variant & 2) != 0 ? bias.data() : nullptr;
        std::vector<T> y(x.size());
        normalize_row(x.data(), T(1000), T(0.5), w, b, y.data(), n);
        for (size_t i = 0; i < x.size(); ++i) {
          const double expected = (x[i] - 1000.0) * 0.5 * (w != nullptr ? w[i] : 1) + (b != nullptr ? b[i] : 0);
          ASSERT_NEAR(y[i], expected, tolerance<T>() * 10) << target << " " << n << " " << variant;
        }
      }
    }
  });
}
TEST(Normalize, MomentsAndRowsF32) { test_moments<float>(); }
TEST(Normalize, MomentsAndRowsF64) { test_moments<double>(); }

template <class T>
void test_arg(const char* target) {
  for (int64_t n : kSizes) {
    std::mt19937 random(5);
    std::vector<Stored<T>> values(static_cast<size_t>(n));
    for (int round = 0; round < 20; ++round) {
      for (auto& x : values) {
        const int v = static_cast<int>(random() % 50);
        if constexpr (kIsHalf<T>) {
          x = T(static_cast<float>(v - 25));
        } else if constexpr (std::is_same_v<T, bool>) {
          x = v < 3 ? 1 : 0;
        } else {
          x = static_cast<T>(v);
        }
      }
      const auto less = [](auto a, auto b) {
        if constexpr (kIsHalf<T>) {
          return static_cast<float>(a) < static_cast<float>(b);
        } else {
          return a < b;
        }
      };
      const auto largest = std::max_element(values.begin(), values.end(), less) - values.begin();
      const auto smallest = std::min_element(values.begin(), values.end(), less) - values.begin();
      ASSERT_EQ(argmax(dtype_of<T>)(values.data(), n), largest) << target << " " << dtype_of<T> << " " << n;
      ASSERT_EQ(argmin(dtype_of<T>)(values.data(), n), smallest) << target << " " << dtype_of<T> << " " << n;
    }
  }
}
TEST(ArgReduce, TheFirstExtremeElementWins) {
  for_each_target([](const char* target) {
    for (DType dtype : kAllDTypes) {
      visit_dtype(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (!kIsComplex<T>) test_arg<T>(target);
      });
    }
  });
  EXPECT_EQ(argmax(DType::kC64), nullptr);
}

TEST(ArgReduce, TheFirstNanWinsAndInfinitiesCount) {
  for_each_target([](const char* target) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (int64_t place : {0, 5, 100, 1023, 1024, 2500}) {
      std::vector<float> x(3000, 1.0f);
      x[10] = inf;
      x[20] = -inf;
      x[static_cast<size_t>(place)] = nan;
      x[2999] = nan;
      EXPECT_EQ(argmax(DType::kF32)(x.data(), 3000), place) << target;
      EXPECT_EQ(argmin(DType::kF32)(x.data(), 3000), place) << target;
    }
    const std::vector<float> lowest(40, -inf);
    EXPECT_EQ(argmax(DType::kF32)(lowest.data(), 40), 0);
    EXPECT_EQ(argmin(DType::kF32)(lowest.data(), 40), 0);
    const std::vector<int8_t> bytes(400, -128);
    EXPECT_EQ(argmax(DType::kI8)(bytes.data(), 400), 0);
  });
}

TEST(Dot, AgreesWithExactSumsForEveryDtype) {
  for_each_target([](const char* target) {
    for (DType dtype : kAllDTypes) {
      visit_dtype(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        for (int64_t n : {0, 1, 7, 16, 33, 100, 3000}) {
          // Small integers: exact in any order.
          std::vector<Stored<T>> a, b;
          int64_t expected = 0;
          for (int64_t i = 0; i < n; ++i) {
            const int x = static_cast<int>(i % 2), y = std::is_same_v<T, bool> ? 1 : static_cast<int>(i % 5);
            if constexpr (kIsHalf<T> || kIsComplex<T>) {
              a.push_back(T(static_cast<float>(x)));
              b.push_back(T(static_cast<float>(y)));
            } else {
              a.push_back(static_cast<Stored<T>>(x));
              b.push_back(static_cast<Stored<T>>(y));
            }
            expected += x * y;
          }
          typename ScalarReduce<ReduceOp::kSum, T>::Acc out;
          dot(dtype)(a.data(), b.data(), n, &out);
          EXPECT_EQ(out, static_cast<decltype(out)>(static_cast<float>(expected)))
              << target << " " << dtype << " " << n;
        }
      });
    }
  });
}

TEST(Dot, ComplexProductsAreNotConjugated) {
  const complex64 i(0, 1);
  complex64 out;
  dot(DType::kC64)(&i, &i, 1, &out);
  EXPECT_EQ(out, complex64(-1, 0));
}

TEST(Axpy, AddsAScaledRow) {
  std::vector<float> x(37), y(37);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i);
    y[i] = 1;
  }
  axpy(2.0f, x.data(), y.data(), 36);
  for (size_t i = 0; i < 36; ++i) EXPECT_EQ(y[i], 1 + 2 * static_cast<float>(i));
  EXPECT_EQ(y[36], 1.0f);
}

}  // namespace
}  // namespace chorale::vec
