#include "chorale/base/pool.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

namespace chorale {
namespace {

struct Item {
  static inline int alive = 0;
  int64_t values[4];
  explicit Item(int64_t v = 0) : values{v, v, v, v} { ++alive; }
  ~Item() { --alive; }
};

TEST(Pool, RunsConstructorsAndDestructors) {
  Item* item = base::Pool<Item>::make(7);
  EXPECT_EQ(item->values[3], 7);
  EXPECT_EQ(Item::alive, 1);
  base::Pool<Item>::recycle(item);
  EXPECT_EQ(Item::alive, 0);
}

TEST(Pool, GivesTheLastRecycledMemoryFirst) {
  std::thread([] {  // a fresh thread: its list is empty
    Item* first = base::Pool<Item>::make();
    Item* second = base::Pool<Item>::make();
    base::Pool<Item>::recycle(first);
    base::Pool<Item>::recycle(second);
    Item* third = base::Pool<Item>::make();
    Item* fourth = base::Pool<Item>::make();
    EXPECT_EQ(third, second);
    EXPECT_EQ(fourth, first);
    base::Pool<Item>::recycle(third);
    base::Pool<Item>::recycle(fourth);
  })
      .join();
}

TEST(Pool, ObjectsAliveTogetherNeverShareMemory) {
  std::set<Item*> alive;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 3000; ++i) EXPECT_TRUE(alive.insert(base::Pool<Item>::make(i)).second);
    while (alive.size() > 500) {
      base::Pool<Item>::recycle(*alive.begin());
      alive.erase(alive.begin());
    }
  }
  for (Item* item : alive) base::Pool<Item>::recycle(item);
}

struct Passed {
  int64_t value;
};
TEST(Pool, AnObjectMayDieOnAnotherThread) {
  std::vector<Passed*> made;
  made.reserve(5000);
  for (int i = 0; i < 5000; ++i) made.push_back(base::Pool<Passed>::make(Passed{i}));
  int64_t sum = 0;
  std::thread([&] {
    for (Passed* object : made) {
      sum += object->value;
      base::Pool<Passed>::recycle(object);
    }
  }).join();
  EXPECT_EQ(sum, 5000 * 4999 / 2);
}

// Under AddressSanitizer this test fails when the list of an ended thread is still used.
struct Late {
  static inline int died = 0;
  int64_t value;
  ~Late() { ++died; }
};
struct KeepsUntilThreadEnd {
  std::vector<Late*> held;
  ~KeepsUntilThreadEnd() {
    for (Late* late : held) base::Pool<Late>::recycle(late);
    base::Pool<Late>::recycle(base::Pool<Late>::make());
  }
};
TEST(Pool, ObjectsMayDieAfterTheThreadsListWasClosed) {
  std::thread([] {
    thread_local KeepsUntilThreadEnd keeper;  // made first, so destroyed last
    for (int i = 0; i < 10; ++i) keeper.held.push_back(base::Pool<Late>::make());
    base::Pool<Late>::recycle(base::Pool<Late>::make());
  }).join();
  EXPECT_EQ(Late::died, 12);
}

}  // namespace
}  // namespace chorale
