// In steady state an op call takes no memory from the heap: handles, tape nodes and small blocks come from pools.
#include <gtest/gtest.h>

#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if __has_feature(thread_sanitizer)

TEST(Allocations, AreNotCountedHere) { GTEST_SKIP() << "ThreadSanitizer brings its own operator new"; }

#else

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "chorale/autograd/autograd.h"
#include "chorale/op/functions.h"

namespace {
std::atomic<int64_t> heap_allocations{0};

void* counted(size_t bytes, size_t alignment) {
  heap_allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = alignment > alignof(std::max_align_t)
                     ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                     : std::malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}
}  // namespace

// The whole test program, the library included, allocates through these. Not inlined: g++ would take free() for a
// mismatch.
[[gnu::noinline]] void* operator new(size_t bytes) { return counted(bytes, 1); }
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  heap_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes);
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace chorale {
namespace {

template <class F>
int64_t allocations_of(F&& f) {
  for (int i = 0; i < 5; ++i) f();  // fills the pools and caches
  const int64_t before = heap_allocations.load();
  for (int i = 0; i < 10; ++i) f();
  return heap_allocations.load() - before;
}

TEST(Allocations, TheCounterCounts) {
  const int64_t before = heap_allocations.load();
  std::vector<int> grown(1000);
  EXPECT_EQ(heap_allocations.load() - before, 1);
  EXPECT_EQ(grown.size(), 1000u);
}

TEST(Allocations, OpsOnUpToSixDimensionsTakeNothingFromTheHeap) {
  const Tensor a = full({2, 1, 2, 1, 2, 3}, 0.5), b = full({2, 3}, 2.0), row = full({3}, 1.0);
  EXPECT_EQ(allocations_of([&] { add(a, b); }), 0);
  EXPECT_EQ(allocations_of([&] { mul(a, 2.0); }), 0);
  EXPECT_EQ(allocations_of([&] { add_(b, row); }), 0);
  EXPECT_EQ(allocations_of([&] { tanh(b); }), 0);
  EXPECT_EQ(allocations_of([&] { view(b, {3, 2}); }), 0);
  EXPECT_EQ(allocations_of([&] { transpose(a, 0, 5); }), 0);
  EXPECT_EQ(allocations_of([&] { zeros({2, 3}); }), 0);
}

TEST(Allocations, RecordingTakesNothingFromTheHeapEither) {
  const Tensor w = set_requires_grad(full({2, 3}, 0.5)), x = full({2, 3}, 2.0);
  EXPECT_EQ(allocations_of([&] { mul(w, x); }), 0);
  EXPECT_EQ(allocations_of([&] { tanh(w); }), 0);
  EXPECT_EQ(allocations_of([&] { add(mul(w, x), x); }), 0);
}

}  // namespace
}  // namespace chorale

#endif
