#include "chorale/comm/progress_thread.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "chorale/comm/core_watch.h"
#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// Looks at works without moving them.
bool done_within(const Work& work, std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    if (!work.operations()[0]->pending()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

TEST(ProgressThread, FinishesCallsThatNobodyWaitsFor) {
  run_ranks(3, [](Group& group) {
    ProgressThread helper(group.engine());
    for (int round = 0; round < 3; ++round) {
      const Tensor x = Tensor::from(std::vector<float>(100'000, 1), {100'000});
      const Work large = group.all_reduce(x), small = group.barrier();
      helper.wake();
      EXPECT_TRUE(done_within(large, 20s) && done_within(small, 20s));
      EXPECT_EQ(x.to_vector<float>(), std::vector<float>(100'000, 3));
    }
  });
}

TEST(ProgressThread, EndsWhileCallsAreUnderWay) {
  std::atomic<bool> has_ended{false};
  run_ranks(2, [&](Group& group) {
    Work work;
    if (group.rank() == 0) {
      {
        ProgressThread helper(group.engine());
        work = group.barrier();
        helper.wake();
        std::this_thread::sleep_for(5ms);
      }
      EXPECT_TRUE(work.operations()[0]->pending()) << "rank 1 has not come yet";
      has_ended = true;
    } else {
      while (!has_ended) std::this_thread::sleep_for(1ms);
      work = group.barrier();
    }
    work.wait();
    EXPECT_TRUE(work.is_completed());
  });
}

// ---- Note [A core that others want]

std::optional<CoreWatch::Delay> told_delay;

class CoreWatches : public testing::Test {
 protected:
  void tell(pid_t thread, std::chrono::nanoseconds in_line) { told_delay = CoreWatch::Delay{thread, in_line}; }

  CoreWatch watch_{[] { return told_delay; }};
  const CoreWatch::Clock::time_point start_{std::chrono::hours(1)};
};

TEST_F(CoreWatches, AGapInWhichTheThreadStoodInLineCounts) {
  tell(7, 1ms);
  EXPECT_FALSE(watch_.is_wanted_at(start_));
  watch_.note_gap(start_);
  tell(7, 1ms + 60us);
  EXPECT_TRUE(watch_.note_gap(start_ + 1ms));
  EXPECT_TRUE(watch_.is_wanted_at(start_ + 1ms + 199ms));
  EXPECT_FALSE(watch_.is_wanted_at(start_ + 1ms + 201ms)) << "nobody wants the core any more";
}

TEST_F(CoreWatches, AGapInWhichTheThreadWorkedDoesNotCount) {
  tell(7, 1ms);
  watch_.note_gap(start_);
  EXPECT_FALSE(watch_.is_wanted_at(start_ + 1us));
  tell(7, 1ms + 40us);
  EXPECT_FALSE(watch_.note_gap(start_ + 200us));
  EXPECT_FALSE(watch_.is_wanted_at(start_ + 201us));
}

TEST_F(CoreWatches, WhatAThreadStoodInLineLongAgoDoesNotCount) {
  tell(7, 10ms);
  EXPECT_FALSE(watch_.note_gap(start_)) << "in how long a time?";
  tell(7, 13ms);
  EXPECT_FALSE(watch_.note_gap(start_ + 1s)) << "3 ms of a second";
  tell(7, 16ms);
  EXPECT_TRUE(watch_.note_gap(start_ + 1s + 6ms)) << "3 ms of six";
}

TEST_F(CoreWatches, WhereTheSystemDoesNotTellTheGapCounts) {
  told_delay.reset();
  EXPECT_TRUE(watch_.note_gap(start_));
  EXPECT_TRUE(watch_.is_wanted_at(start_ + 1ms));
  EXPECT_FALSE(watch_.is_wanted_at(start_ + 1s));
  tell(7, 1ms);
  EXPECT_FALSE(watch_.note_gap(start_ + 2s));
  tell(8, 9ms);  // another thread's time is no measure
  EXPECT_FALSE(watch_.note_gap(start_ + 2s + 1ms));
}

TEST_F(CoreWatches, ACoreIsWantedForAsLongAsTheThreadStandsInLine) {
  tell(7, 0ms);
  watch_.note_gap(start_ - 2ms);
  tell(7, 1ms);
  EXPECT_TRUE(watch_.note_gap(start_));
  tell(7, 12ms);  // 11 of 200
  EXPECT_TRUE(watch_.is_wanted_at(start_ + 200ms));
  EXPECT_TRUE(watch_.is_wanted_at(start_ + 399ms));
  tell(7, 21ms);  // 9 of 200
  EXPECT_FALSE(watch_.is_wanted_at(start_ + 400ms));
}

TEST(CoreWatch, TheSystemTellsHowLongThisThreadStoodInLine) {
  const auto first = CoreWatch::delay_of_this_thread();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->thread, gettid());
  // A second thread on the same core: one of them stands in line while the other runs.
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  std::atomic<bool> stop{false};
  std::thread burner([&] {  // inherits the core
    while (!stop.load(std::memory_order_relaxed)) {
    }
  });
  while (CoreWatch::delay_of_this_thread()->time - first->time < 5ms) {
  }
  stop = true;
  burner.join();
  EXPECT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace chorale::comm
