#include "chorale/kernel/cpu/product/product_engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/vec/target.h"

namespace chorale::kernel::cpu {
namespace {

// How a matrix lies in memory: what the strides of a rows x cols matrix are.
enum class Layout { kRows, kColumns, kPaddedRows, kPaddedColumns, kEverySecond };
constexpr Layout kLayouts[] = {Layout::kRows, Layout::kColumns, Layout::kPaddedRows, Layout::kPaddedColumns,
                               Layout::kEverySecond};

struct Strides {
  int64_t row, col, matrix;
};

Strides strides_of(Layout layout, int64_t rows, int64_t cols) {
  switch (layout) {
    case Layout::kRows:
      return {cols, 1, rows * cols};
    case Layout::kColumns:
      return {1, rows, rows * cols};
    case Layout::kPaddedRows:
      return {cols + 3, 1, rows * (cols + 3)};
    case Layout::kPaddedColumns:
      return {1, rows + 5, cols * (rows + 5)};
    case Layout::kEverySecond:
      return {2 * cols + 1, 2, rows * (2 * cols + 1)};
  }
  __builtin_unreachable();
}

template <class T>
struct Wide {
  using type = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
};
template <class R>
struct Wide<std::complex<R>> {
  using type = complex128;
};
template <class T>
using wide = typename Wide<T>::type;

// Values of an exact formula: eighths between -2 and 2, so that f32 sums of a hundred products are exact too.
template <class T>
T value(int64_t i) {
  const auto eighth = static_cast<double>((i * 37 + 11) % 33 - 16);
  if constexpr (is_complex(dtype_of<T>)) {
    using Part = typename T::value_type;
    return T(static_cast<Part>(eighth / 8), static_cast<Part>(i * 5 % 9 - 4));
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(eighth);
  } else {
    return T(static_cast<float>(eighth / 8));
  }
}

template <class T>
std::vector<T> values(int64_t count, int64_t seed) {
  std::vector<T> x(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = value<T>(i + seed);
  return x;
}

double apply(Epilogue epilogue, double x) {
  switch (epilogue) {
    case Epilogue::kNone:
      return x;
    case Epilogue::kRelu:
      return x < 0 ? 0 : x;
    case Epilogue::kGeluErf:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Epilogue::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }
  __builtin_unreachable();
}

template <class T>
wide<T> widen(T x) {
  if constexpr (is_half(dtype_of<T>)) {
    return static_cast<float>(x);
  } else {
    return static_cast<wide<T>>(x);
  }
}

struct Case {
  int64_t batch = 1, m, n, k;
  Layout a = Layout::kRows, b = Layout::kRows, c = Layout::kRows;
  bool shared_b = false;
  double alpha = 1, beta = 0;
  bool bias = false;
  Epilogue epilogue = Epilogue::kNone;
};

std::string describe(const Case& t) {
  return concat("batch ", t.batch, " m ", t.m, " n ", t.n, " k ", t.k, " layouts ", static_cast<int>(t.a),
                static_cast<int>(t.b), static_cast<int>(t.c), " shared_b ", t.shared_b, " alpha ", t.alpha, " beta ",
                t.beta, " bias ", t.bias, " epilogue ", static_cast<int>(t.epilogue));
}

// Runs the case and compares every element of C with the definition, and every element between those of C with what it
// was.
template <class T>
void check(const Case& t, double tolerance) {
  SCOPED_TRACE(describe(t));
  const Strides sa = strides_of(t.a, t.m, t.k), sb = strides_of(t.b, t.k, t.n), sc = strides_of(t.c, t.m, t.n);
  const int64_t b_batch = t.shared_b ? 0 : sb.matrix;
  const auto a = values<T>(t.batch * sa.matrix, 1), b = values<T>(t.batch * sb.matrix, 2), bias = values<T>(t.n, 3);
  auto c = values<T>(t.batch * sc.matrix, 4);
  std::vector<wide<T>> expected;
  expected.reserve(c.size());
  for (const T& x : c) expected.push_back(widen(x));
  const auto at = [](const auto& x, int64_t i) { return widen(x[static_cast<size_t>(i)]); };
  for (int64_t i = 0; i < t.batch; ++i) {
    for (int64_t row = 0; row < t.m; ++row) {
      for (int64_t col = 0; col < t.n; ++col) {
        wide<T> sum{};
        for (int64_t k = 0; k < t.k; ++k) {
          sum += at(a, i * sa.matrix + row * sa.row + k * sa.col) * at(b, i * b_batch + k * sb.row + col * sb.col);
        }
        wide<T>& x = expected[static_cast<size_t>(i * sc.matrix + row * sc.row + col * sc.col)];
        using Scale = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
        x = static_cast<Scale>(t.alpha) * sum + static_cast<Scale>(t.beta) * x;
        if (t.bias) x += at(bias, col);
        if constexpr (std::is_same_v<wide<T>, double>) x = apply(t.epilogue, x);
      }
    }
  }
  // Where C is not read, anything may be there.
  if constexpr (!std::is_integral_v<T> && !is_complex(dtype_of<T>)) {
    if (t.beta == 0) {
      for (int64_t i = 0; i < t.batch; ++i) {
        for (int64_t row = 0; row < t.m; ++row) {
          for (int64_t col = 0; col < t.n; ++col) {
            c[static_cast<size_t>(i * sc.matrix + row * sc.row + col * sc.col)] =
                T(std::numeric_limits<float>::quiet_NaN());
          }
        }
      }
    }
  }
  product({.dtype = dtype_of<T>,
           .batch = t.batch,
           .m = t.m,
           .n = t.n,
           .k = t.k,
           .a = a.data(),
           .b = b.data(),
           .c = c.data(),
           .a_batch = sa.matrix,
           .a_row = sa.row,
           .a_col = sa.col,
           .b_batch = b_batch,
           .b_row = sb.row,
           .b_col = sb.col,
           .c_batch = sc.matrix,
           .c_row = sc.row,
           .c_col = sc.col,
           .bias = t.bias ? bias.data() : nullptr,
           .alpha = t.alpha,
           .beta = t.beta,
           .epilogue = t.epilogue});
  for (size_t i = 0; i < c.size(); ++i) {
    if constexpr (std::is_integral_v<T>) {
      ASSERT_EQ(c[i], static_cast<T>(expected[i])) << "element " << i;
    } else {
      // Written so that NaN fails.
      const double error = std::abs(widen(c[i]) - expected[i]);
      ASSERT_TRUE(error <= tolerance * (1 + std::abs(expected[i])))
          << "element " << i << ": " << widen(c[i]) << ", expected " << expected[i];
    }
  }
}

constexpr double kF32 = 2e-6, kF64 = 1e-14;

TEST(Product, EveryOddSizeMatchesTheDefinition) {
  for (int64_t size = 1; size <= 70; ++size) {
    check<float>({.m = size, .n = size, .k = size}, kF32);
    check<float>({.m = size, .n = 71 - size, .k = 17, .b = Layout::kColumns}, kF32);
    check<double>({.m = 71 - size, .n = size, .k = size}, kF64);
  }
}

TEST(Product, EveryLayoutOfEveryOperandMatchesTheDefinition) {
  struct Shape {
    int64_t m, n, k;
  };
  // Small and large enough for each path, vectors, and one dimension at a time equal to 1.
  for (const Shape s : {Shape{5, 7, 6}, Shape{33, 18, 21}, Shape{70, 90, 80}, Shape{1, 40, 30}, Shape{40, 1, 30},
                        Shape{1, 1, 50}, Shape{30, 20, 1}, Shape{1, 300, 200}, Shape{300, 1, 200}}) {
    for (const Layout a : kLayouts) {
      for (const Layout b : kLayouts) {
        for (const Layout c : kLayouts) {
          check<float>({.m = s.m, .n = s.n, .k = s.k, .a = a, .b = b, .c = c}, kF32);
          check<double>({.m = s.m, .n = s.n, .k = s.k, .a = a, .b = b, .c = c, .alpha = 0.5, .beta = 2}, kF64);
        }
      }
    }
  }
}

TEST(Product, ScalesBiasAndEpiloguesCombine) {
  for (const int64_t size : {3, 20, 75}) {
    for (const double alpha : {1.0, -0.5}) {
      for (const double beta : {0.0, 1.0, 0.25}) {
        for (const bool bias : {false, true}) {
          for (const Epilogue e : {Epilogue::kNone, Epilogue::kRelu, Epilogue::kGeluErf, Epilogue::kGeluTanh}) {
            for (const Layout c : {Layout::kRows, Layout::kColumns, Layout::kEverySecond}) {
              check<float>(
                  {.m = size, .n = size + 1, .k = 9, .c = c, .alpha = alpha, .beta = beta, .bias = bias, .epilogue = e},
                  kF32);
            }
            check<double>({.m = size, .n = 1, .k = 12, .alpha = alpha, .beta = beta, .bias = bias, .epilogue = e},
                          kF64);
            check<double>({.m = 1,
                           .n = size,
                           .k = 12,
                           .b = Layout::kColumns,
                           .alpha = alpha,
                           .beta = beta,
                           .bias = bias,
                           .epilogue = e},
                          kF64);
          }
        }
      }
    }
  }
}

TEST(Product, BatchesMatchTheDefinition) {
  for (const int64_t size : {4, 23, 70}) {
    for (const bool shared : {false, true}) {
      for (const Layout a : {Layout::kRows, Layout::kColumns}) {
        for (const Layout b : {Layout::kRows, Layout::kColumns, Layout::kEverySecond}) {
          check<float>(
              {.batch = 7, .m = size, .n = size + 2, .k = 11, .a = a, .b = b, .shared_b = shared, .bias = true}, kF32);
          check<double>({.batch = 3, .m = 2, .n = size, .k = size, .a = a, .b = b, .shared_b = shared, .beta = 1},
                        kF64);
        }
      }
    }
  }
}

TEST(Product, LargeProductsMatchTheDefinition) {
  for (const Epilogue e : {Epilogue::kNone, Epilogue::kRelu, Epilogue::kGeluErf, Epilogue::kGeluTanh}) {
    check<float>({.m = 130, .n = 257, .k = 90, .b = Layout::kColumns, .bias = true, .epilogue = e}, kF32);
    check<float>({.m = 130, .n = 257, .k = 90, .b = Layout::kPaddedRows, .bias = true, .epilogue = e}, kF32);
    check<float>({.m = 300, .n = 40, .k = 50, .bias = true, .epilogue = e}, kF32);
  }
  check<float>(
      {.m = 100, .n = 110, .k = 120, .a = Layout::kColumns, .b = Layout::kPaddedColumns, .c = Layout::kColumns}, kF32);
  check<double>({.m = 129, .n = 140, .k = 150, .a = Layout::kColumns}, kF64);
}

TEST(Product, ComplexProductsMatchTheDefinition) {
  for (const Layout a : kLayouts) {
    for (const Layout b : kLayouts) {
      for (const Layout c : kLayouts) {
        check<complex64>({.batch = 2, .m = 9, .n = 13, .k = 8, .a = a, .b = b, .c = c, .alpha = 2, .beta = 0.5}, kF32);
        check<complex128>({.m = 9, .n = 13, .k = 8, .a = a, .b = b, .c = c}, kF64);
      }
    }
  }
}

TEST(Product, HalvesAccumulateInF32AndRoundOnce) {
  // Half a unit in the last place, and the rest for the f32 sums.
  constexpr double kBF16 = 0.5 / 128 * 1.01, kF16 = 0.5 / 1024 * 1.01;
  struct Shape {
    int64_t m, n, k;
  };
  for (const Shape s : {Shape{1, 1, 1}, Shape{5, 7, 6}, Shape{40, 50, 60}, Shape{1, 300, 200}, Shape{300, 1, 200},
                        Shape{3, 1, 70}, Shape{1, 4, 9000}, Shape{20, 10, 0}}) {
    for (const Layout a : kLayouts) {
      for (const Layout b : kLayouts) {
        for (const Layout c : {Layout::kRows, Layout::kColumns, Layout::kEverySecond}) {
          check<bfloat16>({.m = s.m, .n = s.n, .k = s.k, .a = a, .b = b, .c = c}, kBF16);
          check<float16>(
              {.m = s.m, .n = s.n, .k = s.k, .a = a, .b = b, .c = c, .bias = true, .epilogue = Epilogue::kRelu}, kF16);
          check<bfloat16>({.m = s.m, .n = s.n, .k = s.k, .a = a, .b = b, .c = c, .alpha = 0.5, .beta = 2, .bias = true},
                          kBF16);
        }
      }
    }
  }
  for (const bool shared : {false, true}) {
    check<bfloat16>({.batch = 5,
                     .m = 40,
                     .n = 50,
                     .k = 60,
                     .b = Layout::kColumns,
                     .shared_b = shared,
                     .bias = true,
                     .epilogue = Epilogue::kGeluErf},
                    kBF16);
    check<float16>({.batch = 5, .m = 4, .n = 5, .k = 6, .a = Layout::kColumns, .shared_b = shared}, kF16);
  }
}

template <class T>
void check_integers() {
  for (const Layout a : kLayouts) {
    for (const Layout b : kLayouts) {
      check<T>({.batch = 2, .m = 9, .n = 13, .k = 20, .a = a, .b = b, .c = Layout::kColumns, .alpha = 2, .beta = 3}, 0);
    }
  }
  check<T>({.m = 40, .n = 600, .k = 30, .shared_b = true}, 0);
}

TEST(Product, IntegersAreExactModuloTheirType) {
  check_integers<uint8_t>();
  check_integers<int8_t>();
  check_integers<int16_t>();
  check_integers<int32_t>();
  check_integers<int64_t>();
}

TEST(Product, NoInnerDimensionLeavesScaledCAndBias) {
  for (const Layout c : kLayouts) {
    check<float>({.batch = 2, .m = 3, .n = 4, .k = 0, .c = c, .beta = 2, .bias = true, .epilogue = Epilogue::kRelu},
                 kF32);
    check<double>({.m = 3, .n = 4, .k = 0, .c = c}, kF64);
    check<complex64>({.m = 3, .n = 4, .k = 0, .c = c, .beta = 2}, kF32);
    check<int32_t>({.m = 3, .n = 4, .k = 0, .c = c, .beta = 2}, 0);
  }
}

TEST(Product, NothingIsTouchedWhereThereAreNoElements) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kC64, DType::kI32}) {
    Product p{.dtype = dtype,
              .m = 0,
              .n = 5,
              .k = 5,
              .a = nullptr,
              .b = nullptr,
              .c = nullptr,
              .a_row = 5,
              .a_col = 1,
              .b_row = 5,
              .b_col = 1,
              .c_row = 5,
              .c_col = 1};
    product(p);
    p.m = 5;
    p.n = 0;
    product(p);
    p.n = 5;
    p.batch = 0;
    product(p);
  }
}

TEST(Product, RowsThatCoincideAreReadInPlace) {
  // An expanded row: stride 0. BLAS refuses it, so it is copied on the way.
  for (const int64_t size : {10, 80}) {
    const auto a = values<float>(size, 1), b = values<float>(size * size, 2);
    std::vector<float> c(static_cast<size_t>(size * size));
    product({.dtype = DType::kF32,
             .m = size,
             .n = size,
             .k = size,
             .a = a.data(),
             .b = b.data(),
             .c = c.data(),
             .a_row = 0,
             .a_col = 1,
             .b_row = size,
             .b_col = 1,
             .c_row = size,
             .c_col = 1});
    for (int64_t row = 1; row < size; ++row) {
      for (int64_t col = 0; col < size; ++col) {
        double sum = 0;
        for (int64_t k = 0; k < size; ++k)
          sum += double{a[static_cast<size_t>(k)]} * b[static_cast<size_t>(k * size + col)];
        ASSERT_NEAR(c[static_cast<size_t>(row * size + col)], sum, 1e-4);
      }
    }
  }
}

TEST(Product, NanAndInfinityReachTheResult) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t size : {2, 20, 80}) {
    for (const Epilogue e : {Epilogue::kNone, Epilogue::kRelu}) {
      std::vector<float> a(static_cast<size_t>(size * size), 0.f), b(a), c(a);
      a[0] = kNan;
      product({.dtype = DType::kF32,
               .m = size,
               .n = size,
               .k = size,
               .a = a.data(),
               .b = b.data(),
               .c = c.data(),
               .a_row = size,
               .a_col = 1,
               .b_row = size,
               .b_col = 1,
               .c_row = size,
               .c_col = 1,
               .epilogue = e});
      for (int64_t col = 0; col < size; ++col) EXPECT_TRUE(std::isnan(c[static_cast<size_t>(col)]));
      EXPECT_EQ(c[static_cast<size_t>(size)], 0.f);
    }
  }
}

TEST(Product, ThreadsDoNotChangeTheShapeOfTheAnswer) {
  const int before = thread_count();
  for (const int threads : {1, 2, 3}) {
    set_thread_count(threads);
    check<float>({.m = 200, .n = 150, .k = 100, .bias = true, .epilogue = Epilogue::kRelu}, kF32);
    check<float>({.batch = 64, .m = 20, .n = 15, .k = 30, .b = Layout::kColumns}, kF32);
    check<double>({.m = 1, .n = 900, .k = 800, .b = Layout::kColumns, .bias = true}, kF64);
  }
  set_thread_count(before);
}

TEST(Product, EveryInstructionSetMatchesTheDefinition) {
  for (const char* target : vec::available_targets()) {
    SCOPED_TRACE(target);
    vec::force_target(target);
    for (int64_t size = 1; size <= 40; ++size) {
      for (const Layout b : {Layout::kRows, Layout::kColumns}) {
        check<float>(
            {.m = size, .n = 41 - size, .k = 9, .b = b, .beta = 0.5, .bias = true, .epilogue = Epilogue::kRelu}, kF32);
        check<double>({.m = size, .n = size, .k = 41 - size, .b = b}, kF64);
        check<float>({.m = 1, .n = size, .k = 2 * size + 1, .b = b}, kF32);
        check<bfloat16>({.m = 1, .n = size, .k = 2 * size + 1, .b = b}, 0.5 / 128 * 1.01);
        check<float16>({.m = 1, .n = 3 * size, .k = size, .b = b}, 0.5 / 1024 * 1.01);
      }
    }
  }
  vec::force_target(nullptr);
}

TEST(Product, UnknownCombinationsAreErrors) {
  Product p{.dtype = DType::kBool,
            .m = 1,
            .n = 1,
            .k = 1,
            .a = nullptr,
            .b = nullptr,
            .c = nullptr,
            .a_row = 1,
            .a_col = 1,
            .b_row = 1,
            .b_col = 1,
            .c_row = 1,
            .c_col = 1};
  EXPECT_THROW(product(p), InvalidArgument);
  p.dtype = DType::kI32;
  p.epilogue = Epilogue::kRelu;
  EXPECT_THROW(product(p), InvalidArgument);
}

}  // namespace
}  // namespace chorale::kernel::cpu
