#include "chorale/base/intrusive.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace chorale {
namespace {

struct Thing : base::RefCounted {
  static inline std::atomic<int> destroyed{0};
  static void destroy(Thing* thing) {
    ++destroyed;
    delete thing;
  }
};
using Handle = base::Intrusive<Thing>;

class IntrusiveTest : public testing::Test {
 protected:
  void SetUp() override { Thing::destroyed = 0; }
};

TEST_F(IntrusiveTest, TheLastHandleDestroys) {
  {
    const Handle first = Handle::adopt(new Thing);
    EXPECT_EQ(first->use_count(), 1);
    {
      const Handle second = first, third = Handle::share(first.get());
      EXPECT_EQ(first->use_count(), 3);
      EXPECT_EQ(second, third);
    }
    EXPECT_EQ(first->use_count(), 1);
    EXPECT_EQ(Thing::destroyed, 0);
  }
  EXPECT_EQ(Thing::destroyed, 1);
}

TEST_F(IntrusiveTest, AssignmentReleasesWhatWasHeldAndSurvivesItself) {
  Handle a = Handle::adopt(new Thing), b = Handle::adopt(new Thing);
  a = b;
  EXPECT_EQ(Thing::destroyed, 1);
  const Handle& same = a;
  a = same;
  a = std::move(const_cast<Handle&>(same));
  EXPECT_EQ(a->use_count(), 2);
  a = Handle();
  b = std::move(a);
  EXPECT_FALSE(b);
  EXPECT_EQ(Thing::destroyed, 2);
}

TEST_F(IntrusiveTest, MoveAndReleaseTransferTheReference) {
  Handle a = Handle::adopt(new Thing);
  Handle b = std::move(a);
  EXPECT_FALSE(a);
  EXPECT_EQ(b->use_count(), 1);
  Thing* raw = b.release();
  EXPECT_FALSE(b);
  EXPECT_EQ(Thing::destroyed, 0);
  Handle::adopt(raw);
  EXPECT_EQ(Thing::destroyed, 1);
}

TEST_F(IntrusiveTest, HandlesOnManyThreadsDestroyOnce) {
  for (int round = 0; round < 50; ++round) {
    std::vector<std::thread> threads;
    {
      const Handle shared = Handle::adopt(new Thing);
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([mine = shared] {
          for (int i = 0; i < 100; ++i) {
            const Handle copy = mine;
            EXPECT_GE(copy->use_count(), 2);
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(Thing::destroyed, 50);
}

}  // namespace
}  // namespace chorale
