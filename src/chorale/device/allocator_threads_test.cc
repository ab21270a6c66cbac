// The allocator under several threads; ThreadSanitizer reads along.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "chorale/device/allocator.h"

namespace chorale {
namespace {

class AllocatorThreadsTest : public testing::Test {
 protected:
  CachingAllocator allocator{private_pages()};
};

TEST_F(AllocatorThreadsTest, ABlockFreedElsewhereReturnsToItsOwnersList) {
  std::vector<memory::Block> blocks;
  blocks.reserve(3000);
  for (int i = 0; i < 3000; ++i) blocks.push_back(allocator.allocate(256));
  std::vector<std::byte*> before;
  before.reserve(blocks.size());
  for (const memory::Block& block : blocks) before.push_back(block.data);
  std::byte* others = nullptr;
  std::thread([&] {
    for (const memory::Block& block : blocks) allocator.deallocate(block);
    // The thread that freed them gets none of them.
    const memory::Block own = allocator.allocate(256);
    others = own.data;
    allocator.deallocate(own);
  }).join();
  EXPECT_EQ(std::count(before.begin(), before.end(), others), 0);
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
  const size_t reserved = allocator.stats().reserved_bytes;
  // First what is left of the last span, then the returned ones, all of them.
  std::vector<memory::Block> again;
  std::vector<std::byte*> after;
  for (int i = 0; i < 3000 + 256; ++i) {
    again.push_back(allocator.allocate(256));
    after.push_back(again.back().data);
  }
  std::sort(before.begin(), before.end());
  std::sort(after.begin(), after.end());
  EXPECT_TRUE(std::includes(after.begin(), after.end(), before.begin(), before.end()));
  EXPECT_EQ(allocator.stats().reserved_bytes, reserved);
  for (const memory::Block& block : again) allocator.deallocate(block);
}

TEST_F(AllocatorThreadsTest, AnEndedThreadsMemoryIsAdoptedByTheNext) {
  std::byte* first = nullptr;
  memory::Block survivor;
  std::thread([&] {
    const memory::Block block = allocator.allocate(1000);
    survivor = allocator.allocate(1000);
    first = block.data;
    allocator.deallocate(block);
  }).join();
  allocator.deallocate(survivor);  // its owner has no thread now
  std::thread([&] {
    const memory::Block a = allocator.allocate(1000);
    EXPECT_EQ(a.data, first);
    allocator.deallocate(a);
  }).join();
  for (int i = 0; i < 200; ++i) {
    std::thread([&] { allocator.deallocate(allocator.allocate(1000)); }).join();
  }
  EXPECT_EQ(allocator.stats().reserved_bytes, memory::kArenaBytes);
}

// Allocates while the thread's variables are destroyed, after the allocator's own.
struct Late {
  CachingAllocator* allocator = nullptr;
  memory::Block held;
  ~Late() {
    if (!allocator) return;
    for (int i = 0; i < 100; ++i) {
      const memory::Block block = allocator->allocate(5000);
      std::memset(block.data, i, 5000);
      allocator->deallocate(block);
    }
    allocator->deallocate(held);
  }
};
thread_local Late late;
TEST_F(AllocatorThreadsTest, AThreadMayAllocateUntilItsVeryEnd) {
  for (int i = 0; i < 20; ++i) {
    std::thread([&] {
      late.allocator = &allocator;  // made before the thread's cache, so destroyed after it
      late.held = allocator.allocate(5000);
    }).join();
  }
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
  EXPECT_EQ(allocator.stats().reserved_bytes, memory::kArenaBytes);
  allocator.trim();  // no cache was lost with its thread
  EXPECT_EQ(allocator.stats().reserved_bytes, 0u);
}

TEST_F(AllocatorThreadsTest, OneThreadMayUseManyAllocatorsInTurn) {
  std::vector<std::unique_ptr<CachingAllocator>> allocators;
  allocators.reserve(5);
  for (int i = 0; i < 5; ++i) allocators.push_back(std::make_unique<CachingAllocator>(private_pages()));
  std::vector<std::pair<size_t, memory::Block>> live;
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) {
    const size_t which = random() % allocators.size();
    if (!allocators[which]) continue;
    live.emplace_back(which, allocators[which]->allocate(random() % 2000 + 1));
    if (live.size() > 100) {
      std::swap(live[random() % live.size()], live.back());
      allocators[live.back().first]->deallocate(live.back().second);
      live.pop_back();
    }
  }
  for (const auto& [which, block] : live) allocators[which]->deallocate(block);
  for (const auto& one : allocators) EXPECT_EQ(one->stats().current_bytes, 0u);
}

// Threads pass blocks through a common bag: most are freed by a thread that did not make them. Each block carries a
// pattern that its last user checks.
TEST_F(AllocatorThreadsTest, ManyThreadsPassBlocksAround) {
  constexpr int kThreads = 8, kRounds = 30000;
  struct Held {
    memory::Block block;
    size_t bytes;
    unsigned char pattern;
  };
  std::mutex mutex;
  std::vector<Held> bag;
  std::atomic<int> torn{0};
  const auto check_and_free = [&](const Held& held) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(held.block.data);
    for (const size_t at : {size_t{0}, held.bytes / 2, held.bytes - 1}) torn += bytes[at] != held.pattern;
    allocator.deallocate(held.block);
  };
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < kRounds; ++i) {
      const size_t bytes = random() % (random() % 100 == 0 ? size_t{600} << 10 : 3000) + 1;
      Held held{allocator.allocate(bytes), bytes, static_cast<unsigned char>(random())};
      std::memset(held.block.data, held.pattern, bytes);
      {
        const std::lock_guard lock(mutex);
        bag.push_back(held);
        if (bag.size() < 200) continue;
        std::swap(bag[random() % bag.size()], bag.back());
        held = bag.back();
        bag.pop_back();
      }
      check_and_free(held);
      if (random() % 500 == 0) allocator.trim();
      if (random() % 500 == 0) allocator.reset_peak();
      const MemoryStats stats = allocator.stats();
      if (stats.reserved_bytes > size_t{64} * memory::kArenaBytes) ++torn;
      if (!allocator.locate(&held)) continue;
      ++torn;  // the stack is not ours
    }
  };
  for (unsigned generation = 0; generation < 2; ++generation) {  // the second adopts the caches of the first
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t) threads.emplace_back(work, generation * kThreads + t);
    for (std::thread& thread : threads) thread.join();
  }
  for (const Held& held : bag) check_and_free(held);
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
  allocator.trim();
  EXPECT_EQ(allocator.stats().reserved_bytes, 0u);
}

TEST_F(AllocatorThreadsTest, ThePeakIsNeverBelowWhatAThreadHolds) {
  // Blocks of different threads may or may not be alive together, but each thread's own are.
  std::atomic<bool> stop{false};
  std::thread resetter([&] {
    while (!stop) allocator.reset_peak();
  });
  for (int i = 0; i < 20000; ++i) {
    const memory::Block block = allocator.allocate(size_t{1} << 20);
    const memory::Block small = allocator.allocate(64);
    EXPECT_GE(allocator.stats().current_bytes, block.bytes + small.bytes);
    allocator.deallocate(small);
    allocator.deallocate(block);
  }
  const memory::Block held = allocator.allocate(size_t{1} << 20);
  stop = true;
  resetter.join();
  EXPECT_GE(allocator.stats().peak_bytes, held.bytes);
  allocator.deallocate(held);
}

}  // namespace
}  // namespace chorale
