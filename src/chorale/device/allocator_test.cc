#include "chorale/device/allocator.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/pages.h"

namespace chorale {
namespace {

// Counts what passes between an allocator and its source. It belongs to the test and outlives the allocator's view of
// it.
struct Ledger {
  size_t live_bytes = 0;
  int acquired = 0, released = 0;
  std::map<std::byte*, size_t> arenas;
};
class CountingSource final : public memory::ArenaSource {
 public:
  explicit CountingSource(Ledger& ledger) : ledger_(ledger) {}
  memory::Arena acquire(size_t bytes) override {
    const memory::Arena arena = pages_->acquire(bytes);
    ++ledger_.acquired;
    ledger_.live_bytes += bytes;
    ledger_.arenas[arena.base] = bytes;
    return arena;
  }
  void release(const memory::Arena& arena) noexcept override {
    ++ledger_.released;
    ledger_.live_bytes -= arena.bytes;
    ledger_.arenas.erase(arena.base);
    pages_->release(arena);
  }

 private:
  Ledger& ledger_;
  std::unique_ptr<memory::ArenaSource> pages_ = private_pages();
};

class AllocatorTest : public testing::Test {
 protected:
  Ledger ledger;
  CachingAllocator allocator{std::make_unique<CountingSource>(ledger)};
};

// 64, 128 … 512, then four sizes per doubling up to 256 KiB, then pages: the documented rounding, written another way.
size_t expected_rounding(size_t bytes) {
  if (bytes > memory::kLargestSmallBytes) return (bytes + 4095) / 4096 * 4096;
  size_t step = 64;
  while (step * 8 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

TEST_F(AllocatorTest, EveryBlockIsAlignedLargeEnoughAndRoundedByAtMostAQuarter) {
  std::vector<size_t> sizes;
  for (size_t bytes = 1; bytes <= 5000; ++bytes) sizes.push_back(bytes);
  for (size_t power = 8192; power <= size_t{4} << 20; power *= 2) {
    for (const size_t bytes : {power - 1, power, power + 1, power + power / 4, power + power / 4 + 1})
      sizes.push_back(bytes);
  }
  for (const size_t bytes : sizes) {
    const memory::Block block = allocator.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.data) % memory::kBlockAlignment, 0u);
    EXPECT_EQ(block.bytes, expected_rounding(bytes)) << bytes;
    if (bytes > memory::kLargestSmallBytes) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block.data) % memory::kPageBytes, 0u);
    }
    std::memset(block.data, 0xab, bytes);
    allocator.deallocate(block);
  }
}

TEST_F(AllocatorTest, LiveBlocksNeverOverlap) {
  std::mt19937 random(1);
  std::map<std::byte*, memory::Block> live;
  for (int i = 0; i < 20000; ++i) {
    if (live.size() > 300) {
      const auto victim = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      allocator.deallocate(victim->second);
      live.erase(victim);
    }
    const size_t bytes = random() % (random() % 50 == 0 ? size_t{3} << 20 : 9000) + 1;
    const memory::Block block = allocator.allocate(bytes);
    const auto next = live.lower_bound(block.data);
    if (next != live.end()) {
      ASSERT_LE(block.data + block.bytes, next->first);
    }
    if (next != live.begin()) {
      ASSERT_LE(std::prev(next)->first + std::prev(next)->second.bytes, block.data);
    }
    live[block.data] = block;
  }
  for (const auto& [data, block] : live) allocator.deallocate(block);
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
}

TEST_F(AllocatorTest, AFreedBlockIsReusedForTheSameClass) {
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{4096}, size_t{200} << 10, size_t{5} << 20}) {
    const memory::Block first = allocator.allocate(bytes);
    allocator.deallocate(first);
    const memory::Block second = allocator.allocate(bytes);
    EXPECT_EQ(second.data, first.data) << bytes;
    allocator.deallocate(second);
  }
}

TEST_F(AllocatorTest, ZeroBytesGiveANullBlockThatMayBeFreed) {
  const memory::Block block = allocator.allocate(0);
  EXPECT_EQ(block.data, nullptr);
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
  allocator.deallocate(block);
  EXPECT_EQ(ledger.acquired, 0);
}

TEST_F(AllocatorTest, AbsurdSizesAreErrorsThatShowThem) {
  for (const size_t bytes : {size_t{1} << 46, ~size_t{0}, ~size_t{0} - 4095}) {
    try {
      allocator.allocate(bytes);
      FAIL() << "no error for " << bytes;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(ledger.acquired, 0);
}

class EmptySource final : public memory::ArenaSource {
 public:
  memory::Arena acquire(size_t bytes) override { throw StateError("no " + std::to_string(bytes)); }
  void release(const memory::Arena&) noexcept override {}
};
TEST(Allocator, AFailingSourceIsReportedAndChangesNothing) {
  CachingAllocator allocator(std::make_unique<EmptySource>());
  EXPECT_THROW(allocator.allocate(100), StateError);
  EXPECT_THROW(allocator.allocate(size_t{1} << 20), StateError);
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
  EXPECT_EQ(allocator.stats().peak_bytes, 0u);
  allocator.set_source(private_pages());
  allocator.deallocate(allocator.allocate(100));
}

TEST_F(AllocatorTest, StatsAgreeWithTheSourceAndWithLiveBlocks) {
  std::mt19937 random(2);
  std::vector<memory::Block> live;
  size_t expected = 0, peak = 0;
  for (int i = 0; i < 3000; ++i) {
    if (!live.empty() && random() % 5 < 2) {
      std::swap(live[random() % live.size()], live.back());
      expected -= live.back().bytes;
      allocator.deallocate(live.back());
      live.pop_back();
    } else {
      const size_t bytes = random() % (random() % 20 == 0 ? size_t{2} << 20 : 5000) + 1;
      live.push_back(allocator.allocate(bytes));
      expected += expected_rounding(bytes);
      peak = std::max(peak, expected);
    }
    const MemoryStats stats = allocator.stats();
    ASSERT_EQ(stats.current_bytes, expected);
    ASSERT_EQ(stats.peak_bytes, peak);
    ASSERT_EQ(stats.reserved_bytes, ledger.live_bytes);
    ASSERT_GE(stats.reserved_bytes, stats.current_bytes);
    if (i % 1000 == 999) {
      allocator.reset_peak();
      peak = expected;
      ASSERT_EQ(allocator.stats().peak_bytes, expected);
    }
  }
  for (const memory::Block& block : live) allocator.deallocate(block);
  EXPECT_EQ(allocator.stats().current_bytes, 0u);
  EXPECT_EQ(allocator.stats().peak_bytes, peak);
}

TEST_F(AllocatorTest, SmallBlocksWasteNoMoreThanTheirRounding) {
  // 40 KiB does not divide a span of 64 KiB: the rest must not be lost.
  std::vector<memory::Block> blocks;
  const size_t bytes = 40 << 10;
  while ((blocks.size() + 1) * bytes <= memory::kArenaBytes) blocks.push_back(allocator.allocate(bytes));
  EXPECT_EQ(ledger.live_bytes, memory::kArenaBytes);
  for (const memory::Block& block : blocks) allocator.deallocate(block);
}

TEST_F(AllocatorTest, NeighboursMergeInsideAnArenaOfSeveralUnits) {
  const memory::Block whole = allocator.allocate(4 * memory::kArenaBytes);
  allocator.deallocate(whole);
  // Cut at the multiples of kArenaBytes, where another arena could begin but does not.
  std::vector<memory::Block> quarters;
  quarters.reserve(4);
  for (int i = 0; i < 4; ++i) quarters.push_back(allocator.allocate(memory::kArenaBytes));
  EXPECT_EQ(ledger.acquired, 1);
  for (const memory::Block& block : quarters) allocator.deallocate(block);
  const memory::Block again = allocator.allocate(4 * memory::kArenaBytes);
  EXPECT_EQ(ledger.acquired, 1);
  allocator.deallocate(again);
}

TEST_F(AllocatorTest, TrimGivesBackEveryArenaWithoutLiveBlocks) {
  std::vector<memory::Block> blocks;
  blocks.reserve(6);
  for (int i = 0; i < 6; ++i) blocks.push_back(allocator.allocate(memory::kArenaBytes - memory::kPageBytes));
  for (int i = 0; i < 1000; ++i) blocks.push_back(allocator.allocate(static_cast<size_t>(i + 1) * 100));
  const memory::Block kept = allocator.allocate(size_t{1} << 20);
  std::memset(kept.data, 0x5a, kept.bytes);
  std::thread([&] {  // an ended thread's cache counts too
    for (int i = 0; i < 1000; ++i) blocks.push_back(allocator.allocate(300));
  })
      .join();
  EXPECT_GE(ledger.acquired, 6);
  for (const memory::Block& block : blocks) allocator.deallocate(block);
  allocator.trim();
  EXPECT_EQ(ledger.live_bytes, memory::kArenaBytes);
  EXPECT_EQ(allocator.stats().reserved_bytes, memory::kArenaBytes);
  EXPECT_TRUE(std::all_of(kept.data, kept.data + kept.bytes, [](std::byte b) { return b == std::byte{0x5a}; }));
  allocator.deallocate(kept);
  allocator.trim();
  EXPECT_EQ(ledger.live_bytes, 0u);
  EXPECT_EQ(allocator.stats().reserved_bytes, 0u);
  EXPECT_EQ(ledger.acquired, ledger.released);
  allocator.deallocate(allocator.allocate(100));  // and it works again
}

TEST_F(AllocatorTest, TrimKeepsSpansWithALiveSmallBlock) {
  std::vector<memory::Block> blocks;
  blocks.reserve(5000);
  for (int i = 0; i < 5000; ++i) blocks.push_back(allocator.allocate(64));
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (i % 1000 != 500) allocator.deallocate(blocks[i]);
  }
  allocator.trim();
  std::set<std::byte*> live;
  for (size_t i = 500; i < blocks.size(); i += 1000) live.insert(blocks[i].data);
  std::vector<memory::Block> fresh;
  for (int i = 0; i < 10000; ++i) {
    fresh.push_back(allocator.allocate(64));
    ASSERT_TRUE(live.insert(fresh.back().data).second);
  }
  for (const memory::Block& block : fresh) allocator.deallocate(block);
  for (size_t i = 500; i < blocks.size(); i += 1000) allocator.deallocate(blocks[i]);
  allocator.trim();
  EXPECT_EQ(ledger.live_bytes, 0u);
}

TEST(Allocator, DestructionReleasesEverythingAtOnce) {
  Ledger ledger;
  {
    CachingAllocator allocator(std::make_unique<CountingSource>(ledger));
    allocator.deallocate(allocator.allocate(100));
    allocator.deallocate(allocator.allocate(size_t{10} << 20));
  }
  EXPECT_EQ(ledger.acquired, ledger.released);
  EXPECT_EQ(ledger.live_bytes, 0u);
}

TEST_F(AllocatorTest, LocateIsExactForEveryAddressAcrossArenas) {
  std::vector<memory::Block> blocks;
  blocks.reserve(4);
  for (int i = 0; i < 4; ++i)
    blocks.push_back(allocator.allocate(memory::kArenaBytes * static_cast<size_t>(i + 1) - 100));
  blocks.push_back(allocator.allocate(100));
  for (const auto& [base, bytes] : ledger.arenas) {
    for (const size_t at : {size_t{0}, size_t{1}, memory::kArenaBytes - 1, bytes / 2 + 3, bytes - 1}) {
      const auto location = allocator.locate(base + at);
      ASSERT_TRUE(location);
      EXPECT_EQ(location->arena.base, base);
      EXPECT_EQ(location->arena.bytes, bytes);
      EXPECT_EQ(location->offset, at);
    }
    for (const std::byte* outside : {base - 1, base + bytes}) {
      // A neighbour may be another arena; it must not be this one.
      const auto location = allocator.locate(outside);
      EXPECT_TRUE(!location || location->arena.base != base);
    }
  }
  for (const memory::Block& block : blocks) allocator.deallocate(block);
}

TEST_F(AllocatorTest, LocateKnowsNothingOfForeignAddresses) {
  const memory::Block block = allocator.allocate(size_t{1} << 20);
  const int on_the_stack = 0;
  const auto on_the_heap = std::make_unique<int>(0);
  EXPECT_FALSE(allocator.locate(&on_the_stack));
  EXPECT_FALSE(allocator.locate(on_the_heap.get()));
  EXPECT_FALSE(allocator.locate(nullptr));
  EXPECT_FALSE(allocator.locate(reinterpret_cast<const void*>(~uintptr_t{0})));
  CachingAllocator other(private_pages());
  const memory::Block foreign = other.allocate(100);
  EXPECT_FALSE(allocator.locate(foreign.data));
  other.deallocate(foreign);
  const std::byte* data = block.data;
  allocator.deallocate(block);
  EXPECT_TRUE(allocator.locate(data));
  allocator.trim();
  EXPECT_FALSE(allocator.locate(data));
}

TEST_F(AllocatorTest, TheSourceCannotChangeOnceAnArenaExists) {
  allocator.set_source(std::make_unique<CountingSource>(ledger));
  const memory::Block block = allocator.allocate(1);
  try {
    allocator.set_source(private_pages());
    FAIL() << "no error";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(memory::kArenaBytes)), std::string::npos) << error.what();
  }
  allocator.deallocate(block);
}

TEST(Allocator, SharedPagesAreSeenThroughAnotherMapping) {
  CachingAllocator allocator(shared_pages());
  std::vector<memory::Block> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(allocator.allocate(memory::kArenaBytes / 2 + memory::kPageBytes));  // one arena each
    std::memset(blocks.back().data, 'a' + i, blocks.back().bytes);
  }
  const int descriptor = allocator.source().shared_descriptor();
  ASSERT_GE(descriptor, 0);
  std::set<uint64_t> offsets;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto location = allocator.locate(blocks[i].data);
    ASSERT_TRUE(location);
    offsets.insert(location->arena.source_offset);
    auto* mapped = static_cast<char*>(mmap(nullptr, blocks[i].bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                                           static_cast<off_t>(location->source_offset())));
    ASSERT_NE(mapped, MAP_FAILED);
    EXPECT_EQ(mapped[0], static_cast<char>('a' + i));
    EXPECT_EQ(mapped[blocks[i].bytes - 1], static_cast<char>('a' + i));
    mapped[7] = 'Z';  // and the other way round
    EXPECT_EQ(blocks[i].data[7], std::byte{'Z'});
    munmap(mapped, blocks[i].bytes);
  }
  EXPECT_EQ(offsets.size(), 3u);
  for (const memory::Block& block : blocks) allocator.deallocate(block);
}

TEST(Allocator, ReleasedSharedPagesAreNeverShownAgain) {
  CachingAllocator allocator(shared_pages());
  const memory::Block first = allocator.allocate(size_t{1} << 20);
  const auto before = allocator.locate(first.data);
  std::memset(first.data, 1, first.bytes);
  allocator.deallocate(first);
  allocator.trim();
  const memory::Block second = allocator.allocate(size_t{1} << 20);
  const auto after = allocator.locate(second.data);
  EXPECT_GE(after->source_offset(), before->arena.source_offset + before->arena.bytes);
  // The old range holds no memory any more: a peer that still maps it reads zeros.
  auto* mapped =
      static_cast<char*>(mmap(nullptr, first.bytes, PROT_READ, MAP_SHARED, allocator.source().shared_descriptor(),
                              static_cast<off_t>(before->source_offset())));
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(mapped[100], 0);
  munmap(mapped, first.bytes);
  allocator.deallocate(second);
}

TEST(Allocator, PrivatePagesHaveNoDescriptor) {
  CachingAllocator allocator(private_pages());
  EXPECT_EQ(allocator.source().shared_descriptor(), -1);
}

TEST(Allocator, OnlyTheCpuHasMemoryHere) {
  EXPECT_EQ(&allocator_of(kCpu), &cpu_allocator());
  EXPECT_THROW(allocator_of(kNull), InvalidArgument);
  EXPECT_THROW(allocator_of(Device{DeviceType::kCuda, 1}), StateError);
  try {
    allocator_of(Device{DeviceType::kCpu, 3});
    FAIL() << "there is one CPU";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "[allocator] there is no device cpu:3: the host is one device, cpu");
  }
}

TEST(CachingAllocator, BlocksAbove16KiBAreAloneInTheirPages) {
  CachingAllocator allocator(private_pages());
  for (size_t bytes : {size_t{1} << 10, size_t{16} << 10, (size_t{16} << 10) + 1, size_t{100000}, size_t{300000}}) {
    std::vector<memory::Block> blocks;
    blocks.reserve(40);
    for (int i = 0; i < 40; ++i) blocks.push_back(allocator.allocate(bytes));
    const auto first_page = [](const memory::Block& block) {
      return reinterpret_cast<uintptr_t>(block.data) / memory::kPageBytes;
    };
    const auto last_page = [&](const memory::Block& block) {
      return (reinterpret_cast<uintptr_t>(block.data) + bytes - 1) / memory::kPageBytes;
    };
    for (const memory::Block& block : blocks) {
      if (!owns_pages(block.data, bytes)) continue;
      for (const memory::Block& other : blocks) {
        if (other.data == block.data) continue;
        EXPECT_TRUE(last_page(other) < first_page(block) || first_page(other) > last_page(block)) << bytes;
      }
    }
    EXPECT_EQ(owns_pages(blocks[0].data + 64, bytes - 64), bytes > (16 << 10) + 64) << bytes;
    for (const memory::Block& block : blocks) allocator.deallocate(block);
  }
}

}  // namespace
}  // namespace chorale
