// Barriers: the rows of section 3.5 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// spec: test_barrier{,_group,_full_group}
TEST(Barrier, NobodyLeavesBeforeTheLastHasCome) {
  run_ranks(3, [](Group& world) {
    in_every_group(world, [](Group& group) {
      for (int late : group.members()) {
        std::vector<double> time(1);
        if (group.global_rank(group.rank()) == late) {
          time[0] = now_s() + 0.03;
          group.broadcast(std::span(time), late).wait();
          std::this_thread::sleep_for(40ms);
          group.barrier().wait();
        } else {
          group.broadcast(std::span(time), late).wait();
          group.barrier().wait();
          EXPECT_GE(now_s(), time[0]);
        }
      }
    });
  });
}

// Holds ranks together outside of the library under test.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}
  void wait() {
    std::unique_lock lock(mutex_);
    ++come_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return come_ % size_ == 0 || come_ > last_ + size_; });
  }

 private:
  const int size_;
  int come_ = 0, last_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// spec: test_barrier_timeout_group, test_barrier_timeout_full_group, test_barrier_timeout_global
TEST(Barrier, TimesOutNotBeforeItsTime) {
  Meeting end(3);
  run_ranks(3,
            [&](Group& world) {
              Group sub = world.new_group({1, 2}, {.timeout = 300ms});
              Group full = world.duplicate();
              for (Group* group : {&sub, &full, &world}) {
                if (group->rank() != 0) continue;
                const auto start = Clock::now();
                EXPECT_THAT(message_of<CommError>([&] { group->barrier().wait(); }), HasSubstr("timed out"));
                EXPECT_GE(Clock::now() - start, 200ms);
              }
              end.wait();
            },
            {.timeout = 300ms});
}

// spec: test_monitored_barrier_gloo, test_monitored_barrier_failure_order
TEST(MonitoredBarrier, NamesTheLowestRankThatStaysAway) {
  Meeting end(4);
  run_ranks(4, [&](Group& group) {
    for (bool all : {false, true}) {
      for (int i = 0; i < 10; ++i) group.all_reduce(cube(2, 1)).wait();
      group.monitored_barrier(5s, all);
    }
    if (group.rank() == 0) {
      const std::string text = message_of<CommError>([&] { group.monitored_barrier(200ms); });
      EXPECT_THAT(
          text, AllOf(HasSubstr("monitored barrier"), HasSubstr("rank 2 did not reach it"), Not(HasSubstr("rank 3"))));
    } else if (group.rank() == 1) {
      // Its own time is no matter: rank 0 finds out.
      const std::string text = message_of<CommError>([&] { group.monitored_barrier(1ms); });
      EXPECT_THAT(text,
                  AllOf(HasSubstr("rank 1 reached the monitored barrier"), HasSubstr("failed waiting on rank 0")));
    }
    end.wait();
  });
}

// spec: test_monitored_barrier_gloo_subgroup
TEST(MonitoredBarrier, OfASubgroupIsNothingToOthers) {
  Meeting end(3);
  run_ranks(3, [&](Group& world) {
    Group group = world.new_group({0, 1});
    if (world.rank() == 0) {
      EXPECT_THAT(message_of<CommError>([&] { group.monitored_barrier(100ms); }), HasSubstr("rank 1 did not reach it"));
    } else if (world.rank() == 2) {
      EXPECT_NO_THROW(group.monitored_barrier(100ms));
    }
    end.wait();
  });
}

// spec: test_monitored_barrier_gloo_rank_0_timeout, test_monitored_barrier_wait_all_ranks
TEST(MonitoredBarrier, WithoutTimeAndWithTimeForEach) {
  Meeting end(4);
  run_ranks(4, [&](Group& world) {
    Group first = world.duplicate(), second = world.duplicate();
    if (world.rank() == 0) {
      EXPECT_THAT(message_of<CommError>([&] { first.monitored_barrier(0ms); }),
                  AllOf(HasSubstr("rank 0 timed out"), HasSubstr("seen: 0")));
      const auto start = Clock::now();
      EXPECT_THAT(message_of<CommError>([&] { second.monitored_barrier(50ms, true); }),
                  HasSubstr("ranks 1, 2, 3 did not reach it"));
      EXPECT_GE(Clock::now() - start, 150ms) << "each has its own time";
    }
    end.wait();
  });
}

TEST(DebugDetail, NamesWhoStaysAwayFromACollective) {
  Meeting end(2);
  run_ranks(2,
            [&](Group& group) {
              group.barrier().wait();
              set_debug_level(DebugLevel::kDetail);
              if (group.rank() == 0) {
                EXPECT_THAT(message_of<CommError>([&] { group.all_reduce(cube(1, 1)).wait(); }),
                            AllOf(HasSubstr("monitored barrier"), HasSubstr("rank 1 did not reach it")));
              }
              end.wait();
              set_debug_level(DebugLevel::kOff);
            },
            {.timeout = 300ms});
}

}  // namespace
}  // namespace chorale::comm
