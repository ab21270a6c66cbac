#include "chorale/kernel/cpu/dnnl/matmul.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/dnnl/primitive.h"

namespace chorale::kernel::cpu::dnnl {
namespace {

// All ones: every element of the result is k.
struct Ones {
  explicit Ones(int64_t m, int64_t n, int64_t k)
      : a(static_cast<size_t>(m * k), 1.f),
        b(static_cast<size_t>(k * n), 1.f),
        c(static_cast<size_t>(m * n)),
        product{.dtype = DType::kF32,
                .m = m,
                .n = n,
                .k = k,
                .a = a.data(),
                .b = b.data(),
                .c = c.data(),
                .a_row = k,
                .a_col = 1,
                .b_row = 1,
                .b_col = k,
                .c_row = n,
                .c_col = 1} {}
  std::vector<float> a, b, c;
  Product product;
};

TEST(PrimitiveCache, SecondCallOfAShapeBuildsNothing) {
  Ones x(21, 22, 23);
  ASSERT_TRUE(matmul(x.product, DType::kF32));
  EXPECT_EQ(x.c, std::vector<float>(x.c.size(), 23.f));
  const CacheCounts before = cache_counts();
  Ones y(21, 22, 23);  // other addresses
  ASSERT_TRUE(matmul(y.product, DType::kF32));
  EXPECT_EQ(y.c, x.c);
  EXPECT_EQ(cache_counts().lookups, before.lookups + 1);
  EXPECT_EQ(cache_counts().built, before.built);
}

TEST(PrimitiveCache, AnotherShapeThreadCountOrEpilogueIsAnotherPrimitive) {
  Ones x(31, 32, 33);
  matmul(x.product, DType::kF32);
  const auto built_by = [](auto&& call) {
    const uint64_t before = cache_counts().built;
    call();
    return cache_counts().built - before;
  };
  EXPECT_EQ(built_by([&] { matmul(x.product, DType::kF32); }), 0u);
  Ones y(31, 32, 34);
  EXPECT_EQ(built_by([&] { matmul(y.product, DType::kF32); }), 1u);
  x.product.epilogue = Epilogue::kRelu;
  EXPECT_EQ(built_by([&] { matmul(x.product, DType::kF32); }), 1u);
  const int threads = thread_count();
  set_thread_count(threads + 1);
  EXPECT_EQ(built_by([&] { matmul(x.product, DType::kF32); }), 1u);
  EXPECT_EQ(thread_count(), threads + 1);
  set_thread_count(threads);
}

TEST(PrimitiveCache, ForgetsBeyondItsCapacityAndKeepsWorking) {
  Cache<int64_t> cache;
  const auto n = static_cast<int64_t>(Cache<int64_t>::kCapacity);
  for (int64_t i = 0; i < 3 * n; ++i) EXPECT_EQ(cache.get(Key{i, -i}, [&] { return 7 * i; }), 7 * i);
  EXPECT_LE(cache.size(), Cache<int64_t>::kCapacity);
}

TEST(PrimitiveCache, AnEntryThatCannotBeMadeIsNotKept) {
  Cache<int> cache;
  EXPECT_THROW(cache.get(Key{1}, []() -> int { throw InvalidArgument("no"); }), InvalidArgument);
  EXPECT_EQ(cache.get(Key{1}, [] { return 5; }), 5);
}

TEST(Matmul, ThreadsOfTheirOwnShareNothing) {
  std::vector<std::thread> threads;
  std::vector<int> good(4);
  for (size_t t = 0; t < good.size(); ++t) {
    threads.emplace_back([&, t] {
      Ones x(24, 25, 26);
      for (int i = 0; i < 20; ++i) good[t] += matmul(x.product, DType::kF32) && x.c[599] == 26.f;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(4, 20));
}

TEST(Matmul, StridesThatOneDnnDoesNotTakeAreRefused) {
  Ones x(4, 4, 4);
  x.product.a_row = 0;
  EXPECT_FALSE(matmul(x.product, DType::kF32));
}

}  // namespace
}  // namespace chorale::kernel::cpu::dnnl
