// A process that forks: Note [Forked children] in device/shared_pages.h.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "chorale/device/shared_pages.h"

namespace chorale {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

bool all_are(const memory::Block& block, int value) {
  for (size_t i = 0; i < block.bytes; ++i) {
    if (block.data[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

// Runs `body` in a forked child; true when it returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class Fork : public testing::Test {
 protected:
  CachingAllocator allocator{shared_pages()};
  memory::Block block = allocator.allocate(kBytes);
  void TearDown() override { allocator.deallocate(block); }
};

TEST_F(Fork, AChildsWritesStayItsOwn) {
  std::memset(block.data, 1, kBytes);
  EXPECT_TRUE(in_child([&] {
    const bool inherited = all_are(block, 1);
    std::memset(block.data, 2, kBytes);
    return inherited && all_are(block, 2);
  }));
  EXPECT_TRUE(all_are(block, 1));
}

TEST_F(Fork, AChildDoesNotSeeWhatItsParentWritesLater) {
  std::memset(block.data, 1, kBytes);
  int written[2];
  ASSERT_EQ(pipe(written), 0);
  const pid_t child = fork();
  if (child == 0) {
    char go;
    const bool told = read(written[0], &go, 1) == 1;
    _exit(told && all_are(block, 1) ? 0 : 1);
  }
  std::memset(block.data, 3, kBytes);
  ASSERT_EQ(write(written[1], "x", 1), 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  close(written[0]);
  close(written[1]);
}

TEST_F(Fork, RenewedPagesAreCopiedFromWhereTheyLie) {
  std::memset(block.data, 1, kBytes);
  dynamic_cast<SharedPages&>(allocator.source()).renew(block.data + 3 * memory::kPageBytes, 2 * memory::kPageBytes);
  std::memset(block.data + 4 * memory::kPageBytes, 1, 16);
  EXPECT_TRUE(in_child([&] { return all_are(block, 1); }));
}

TEST_F(Fork, AChildAllocatesAndFreesWithoutTouchingItsParent) {
  std::memset(block.data, 1, kBytes);
  EXPECT_TRUE(in_child([&] {
    const memory::Block own = allocator.allocate(memory::kArenaBytes + kBytes);  // a new arena
    std::memset(own.data, 4, own.bytes);
    const auto place = allocator.locate(block.data);
    // What is private cannot be shown to peers; what is new can.
    const auto& pages = dynamic_cast<SharedPages&>(allocator.source());
    const bool hidden = !pages.offset_of(place->arena, block.data, kBytes);
    const bool shown = pages.offset_of(allocator.locate(own.data)->arena, own.data, own.bytes).has_value();
    allocator.deallocate(own);
    allocator.deallocate(block);
    allocator.trim();
    return hidden && shown;
  }));
  EXPECT_TRUE(all_are(block, 1));
  const memory::Block next = allocator.allocate(memory::kArenaBytes);
  std::memset(next.data, 5, kBytes);
  EXPECT_TRUE(all_are(block, 1));
  allocator.deallocate(next);
}

TEST_F(Fork, AllocatingThreadsDoNotLeaveAChildStuck) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) allocator.deallocate(allocator.allocate(memory::kLargestSmallBytes * 2));
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(in_child([&] {
      const memory::Block own = allocator.allocate(memory::kLargestSmallBytes * 3);
      std::memset(own.data, 1, own.bytes);
      allocator.deallocate(own);
      return true;
    }));
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace chorale
