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
  const memory::Arena arena = pages.acquire(kArenaBytes);
  std::byte* tensor = arena.base + 5 * kPageBytes;
  const size_t bytes = 3 * kPageBytes;
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
  const memory::Arena arena = pages.acquire(kArenaBytes);
  EXPECT_EQ(ftruncate(pages.shared_descriptor(), static_cast<off_t>(kArenaBytes / 2)), -1);
  EXPECT_EQ(errno, EPERM);
  const memory::Arena second = pages.acquire(kArenaBytes);  // it grows, though
  second.base[0] = arena.base[0] = kByte(3);
  pages.release(second);
  pages.release(arena);
}

TEST(SharedPages, HugePagesKeepContentsAndAreOnlyWhereTheyAreAskedFor) {
  SharedPages pages;
  const memory::Arena arena = pages.acquire(kArenaBytes);
  constexpr size_t kHugeBytes = size_t{2} << 20;
  std::byte* tensor = arena.base + kHugeBytes + 5 * kPageBytes;
  std::memset(tensor, 7, 3 * kPageBytes);
  std::byte* peer = map_again(pages, *pages.offset_of(arena, tensor, kPageBytes), kPageBytes);
  pages.make_huge(tensor, kHugeBytes);  // it touches two
  EXPECT_EQ(tensor[100], kByte(7));
  EXPECT_EQ(tensor[3 * kPageBytes], kByte(0));
  peer[100] = kByte(9);
  EXPECT_EQ(tensor[100], kByte(9)) << "other mappings see the same memory";
  struct stat file {};
  ASSERT_EQ(fstat(pages.shared_descriptor(), &file), 0);
  EXPECT_LE(static_cast<size_t>(file.st_blocks) * 512, 2 * kHugeBytes) << "more memory than was asked for";
  munmap(peer, kPageBytes);
  pages.release(arena);
  ASSERT_EQ(fstat(pages.shared_descriptor(), &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
}

TEST(SharedPages, OffsetsOfPartlyRenewedStretchesAreKnown) {
  SharedPages pages;
  const memory::Arena arena = pages.acquire(kArenaBytes);
  const auto page = [&](size_t number) { return arena.base + number * kPageBytes; };
  pages.renew(page(10), 4 * kPageBytes);
  pages.renew(page(12), 1);
  const auto of = [&](size_t number) { return *pages.offset_of(arena, page(number), kPageBytes); };
  EXPECT_EQ(of(9), arena.source_offset + 9 * kPageBytes);
  EXPECT_EQ(of(14), arena.source_offset + 14 * kPageBytes);
  EXPECT_EQ(of(11), of(10) + kPageBytes);
  EXPECT_EQ(of(13), of(10) + 3 * kPageBytes);
  EXPECT_NE(of(12), of(10) + 2 * kPageBytes);
  EXPECT_FALSE(pages.offset_of(arena, page(9), 2 * kPageBytes)) << "half of it lies elsewhere";
  EXPECT_FALSE(pages.offset_of(arena, page(11), 2 * kPageBytes));
  pages.release(arena);
}

}  // namespace
}  // namespace chorale
