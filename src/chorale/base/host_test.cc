#include "chorale/base/host.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/sysinfo.h>

#include <thread>

namespace chorale {
namespace {

TEST(Host, CoresFollowTheAffinityOfTheProcess) {
  const int before = usable_cores();
  EXPECT_GE(before, 1);
  EXPECT_LE(before, machine_cores());
  int after = 0;
  // A thread of its own inherits the mask, and takes the restricted one with it.
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    after = usable_cores();
  }).join();
  EXPECT_EQ(after, 1);
  EXPECT_EQ(usable_cores(), before);
}

TEST(Host, MemoryIsAtMostThatOfTheMachine) {
  struct sysinfo info {};
  ASSERT_EQ(sysinfo(&info), 0);
  const Room room = memory_room();
  EXPECT_GT(room.free_bytes, 0u);
  EXPECT_LE(room.free_bytes, room.total_bytes);
  EXPECT_LE(room.total_bytes, info.totalram * info.mem_unit);
}

TEST(Host, SharedMemoryHasNoMoreFreeThanInAll) {
  const Room room = shared_memory_room();
  EXPECT_LE(room.free_bytes, room.total_bytes);
}

}  // namespace
}  // namespace chorale
