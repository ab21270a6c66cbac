#include "chorale/device/shared_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>

namespace chorale {
namespace {

constexpr auto kByte = [](int value) { return static_cast<std::byte>(value); };

// What another process would see of the file.
std::byte* map_again(const SharedPages& pages, uint64_t offset, size_t bytes) {
  void* mapping =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pages.shared_descriptor(), static_cast<off_t>(offset));
  return mapping == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapping);
}

TEST(SharedPages, ALateWriterNoLongerReachesRenewedPages) {
  SharedPages pages;
  const memory::Arena arena = pages.acquire(memory::kArenaBytes);
  std::byte* tensor = arena.base + 5 * memory::kPageBytes;
  const size_t bytes = 3 * memory::kPageBytes;
  std::memset(tensor, 7, bytes);
  const auto before = pages.offset_of(arena, tensor, bytes);
  ASSERT_TRUE(before);
  std::byte* peer = map_again(pages, *before, bytes);
  ASSERT_EQ(peer[100], kByte(7));

  pages.renew(tensor, bytes);
  EXPECT_EQ(tensor[100], kByte(7)) << "contents are kept";
  peer[100] = kByte(9);
  EXPECT_EQ(tensor[100], kByte(7));
  // Registered anew: a peer that asks again sees and reaches the new pages.
  const auto after = pages.offset_of(arena, tensor, bytes);
  ASSERT_TRUE(after);
  EXPECT_NE(*after, *before);
  std::byte* again = map_again(pages, *after, bytes);
  again[100] = kByte(11);
  EXPECT_EQ(tensor[100], kByte(11));

  munmap(peer, bytes);
  munmap(again, bytes);
  pages.release(arena);
}

TEST(SharedPages, CannotShrink) {
  SharedPages pages;
  const memory::Arena arena = pages.acquire(memory::kArenaBytes);
  EXPECT_EQ(ftruncate(pages.shared_descriptor(), static_cast<off_t>(memory::kArenaBytes / 2)), -1);
  EXPECT_EQ(errno, EPERM);
  const memory::Arena second = pages.acquire(memory::kArenaBytes);  // it grows, though
  second.base[0] = arena.base[0] = kByte(3);
  pages.release(second);
  pages.release(arena);
}

TEST(SharedPages, HugePagesKeepContentsAndAreOnlyWhereTheyAreAskedFor) {
  SharedPages pages;
  const memory::Arena arena = pages.acquire(memory::kArenaBytes);
  constexpr size_t kHugeBytes = size_t{2} << 20;
  std::byte* tensor = arena.base + kHugeBytes + 5 * memory::kPageBytes;
  std::memset(tensor, 7, 3 * memory::kPageBytes);
  std::byte* peer = map_again(pages, *pages.offset_of(arena, tensor, memory::kPageBytes), memory::kPageBytes);
  pages.make_huge(tensor, kHugeBytes);  // it touches two
  EXPECT_EQ(tensor[100], kByte(7));
  EXPECT_EQ(tensor[3 * memory::kPageBytes], kByte(0));
  peer[100] = kByte(9);
  EXPECT_EQ(tensor[100], kByte(9)) << "other mappings see the same memory";
  struct stat file {};
  ASSERT_EQ(fstat(pages.shared_descriptor(), &file), 0);
  EXPECT_LE(static_cast<size_t>(file.st_blocks) * 512, 2 * kHugeBytes) << "more memory than was asked for";
  munmap(peer, memory::kPageBytes);
  pages.release(arena);
  ASSERT_EQ(fstat(pages.shared_descriptor(), &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
}

TEST(SharedPages, OffsetsOfPartlyRenewedStretchesAreKnown) {
  SharedPages pages;
  const memory::Arena arena = pages.acquire(memory::kArenaBytes);
  const auto page = [&](size_t number) { return arena.base + number * memory::kPageBytes; };
  pages.renew(page(10), 4 * memory::kPageBytes);
  pages.renew(page(12), 1);
  const auto of = [&](size_t number) { return *pages.offset_of(arena, page(number), memory::kPageBytes); };
  EXPECT_EQ(of(9), arena.source_offset + 9 * memory::kPageBytes);
  EXPECT_EQ(of(14), arena.source_offset + 14 * memory::kPageBytes);
  EXPECT_EQ(of(11), of(10) + memory::kPageBytes);
  EXPECT_EQ(of(13), of(10) + 3 * memory::kPageBytes);
  EXPECT_NE(of(12), of(10) + 2 * memory::kPageBytes);
  EXPECT_FALSE(pages.offset_of(arena, page(9), 2 * memory::kPageBytes)) << "half of it lies elsewhere";
  EXPECT_FALSE(pages.offset_of(arena, page(11), 2 * memory::kPageBytes));
  pages.release(arena);
}

}  // namespace
}  // namespace chorale
