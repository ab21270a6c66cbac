#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/base/same_bits.h"
#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::kernel::cpu {
namespace {

// Sums of random numbers, which come out otherwise in another order. They are computed in one piece and in several, by
// rows and by columns.
template <class T>
void expect_same_product_bits(int64_t batch, int64_t m, int64_t n, int64_t k) {
  SCOPED_TRACE(concat(batch, " of ", m, " x ", n, " x ", k));
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::vector<T> a(static_cast<size_t>(batch * m * k)), b(static_cast<size_t>(batch * k * n)),
      bias(static_cast<size_t>(n));
  for (auto* values : {&a, &b, &bias}) {
    for (T& x : *values) x = static_cast<T>(static_cast<float>(normal(random)));
  }
  std::vector<T> first;
  for (const int threads : {1, 2, 3, 4}) {
    set_thread_count(threads);
    std::vector<T> c(static_cast<size_t>(batch * m * n));
    product({.dtype = dtype_of<T>,
             .batch = batch,
             .m = m,
             .n = n,
             .k = k,
             .a = a.data(),
             .b = b.data(),
             .c = c.data(),
             .a_batch = m * k,
             .a_row = k,
             .a_col = 1,
             .b_batch = k * n,
             .b_row = n,
             .b_col = 1,
             .c_batch = m * n,
             .c_row = n,
             .c_col = 1,
             .bias = bias.data()});
    if (threads == 1) first = c;
    EXPECT_EQ(std::memcmp(c.data(), first.data(), c.size() * sizeof(T)), 0) << threads << " threads";
  }
  // The pieces are where they belong. (The operands are numbers of f32.)
  const auto wide = [](T x) { return static_cast<double>(static_cast<float>(x)); };
  for (const int64_t at : {int64_t{0}, batch * m * n / 2 + 3, batch * m * n - 1}) {
    const int64_t matrix = at / (m * n), row = at % (m * n) / n, column = at % n;
    double sum = wide(bias[static_cast<size_t>(column)]);
    for (int64_t i = 0; i < k; ++i)
      sum += wide(a[static_cast<size_t>((matrix * m + row) * k + i)]) *
             wide(b[static_cast<size_t>((matrix * k + i) * n + column)]);
    EXPECT_NEAR(wide(first[static_cast<size_t>(at)]), sum, sizeof(T) == 2 ? 0.5 : 1e-3);
  }
}

TEST(Product, HasTheSameBitsForAnyNumberOfThreadsWhereThatIsWanted) {
  const int before = thread_count();
  set_same_bits(true);
  // A form that the caller's thread has chosen is that of all pieces.
  for (const ProductForm form : {ProductForm::kGemm, ProductForm::kPrimitive}) {
    const ProductFormScope scope(form);
    expect_same_product_bits<float>(1, 200, 150, 900);
  }
  expect_same_product_bits<float>(1, 200, 150, 900);
  expect_same_product_bits<float>(1, 70, 333, 2000);
  expect_same_product_bits<float>(3, 90, 90, 400);
  expect_same_product_bits<double>(1, 300, 20, 1200);
  expect_same_product_bits<double>(1, 129, 257, 700);
  expect_same_product_bits<bfloat16>(1, 200, 130, 500);
  set_same_bits(false);
  set_thread_count(before);
}

}  // namespace
}  // namespace chorale::kernel::cpu
