// Barriers: the rows of section 3.5 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"
#include "chorale/transport/store/file_store.h"

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
  explicit Meeting(int size) : barrier_(size) {}
  void wait() { barrier_.arrive_and_wait(); }

 private:
  std::barrier<> barrier_;
};

// Rank 0 of the group enters a barrier alone, and gets an error with one of these texts, but not before the time is up.
void expect_timeout(const Group& group, const testing::Matcher<const std::string&>& text) {
  if (group.rank() != 0) return;
  const auto start = Clock::now();
  EXPECT_THAT(message_of<CommError>([&] { group.barrier().wait(); }), text);
  EXPECT_GE(Clock::now() - start, group.timeout() - 100ms);
}

// spec: test_barrier_timeout_group, test_barrier_timeout_full_group, test_barrier_timeout_global
TEST(Barrier, TimesOutNotBeforeItsTime) {
  constexpr int kRanks = 3;
  for (DebugLevel level : {DebugLevel::kOff, DebugLevel::kDetail}) {
    const TemporaryFolder folder;
    const std::string path = folder.path() / "store";
    const auto text =
        level == DebugLevel::kDetail
            ? testing::Matcher<const std::string&>(AllOf(HasSubstr("monitored barrier"), HasSubstr("did not reach it")))
            : testing::Matcher<const std::string&>(HasSubstr("timed out"));
    Meeting meeting(kRanks);
    run_ranks(kRanks, [&](Group& world) {
      const int rank = world.rank();
      const Group sub = world.new_group({1, 2}, {.timeout = 400ms}), full = world.duplicate({.timeout = 300ms});
      meeting.wait();
      if (rank == 0) set_debug_level(level);
      meeting.wait();
      expect_timeout(sub, text);
      expect_timeout(full, text);
      // The default group ends, and all meet again at a file with a shorter time.
      world.destroy();
      meeting.wait();
      transport::FileStore store(path);
      const Group again = Group::connect(store, "again", rank, kRanks, {.timeout = 1s});
      EXPECT_EQ(again.timeout(), 1s);
      meeting.wait();
      expect_timeout(again, text);
      meeting.wait();
      if (rank == 0) set_debug_level(DebugLevel::kOff);
    });
  }
}

// spec: test_monitored_barrier_gloo
TEST(MonitoredBarrier, TellsEveryOtherRankThatTheBarrierFailed) {
  constexpr int kRanks = 4;
  Meeting end(kRanks);
  run_ranks(kRanks, [&](Group& group) {
    for (bool all : {false, true}) {
      for (int i = 0; i < 10; ++i) {
        const Tensor x = cube(2, group.rank() + i);
        group.all_reduce(x).wait();
        EXPECT_TRUE(is_cube(x, 2, 6 + 4 * i));
      }
      group.monitored_barrier(20s, all);
    }
    if (group.rank() == 0) {
      EXPECT_THAT(message_blaming(1, [&] { group.monitored_barrier(200ms); }),
                  AllOf(HasSubstr("monitored barrier"), HasSubstr("rank 1 did not reach it"), Not(HasSubstr("rank 2")),
                        Not(HasSubstr("rank 3"))));
    } else if (group.rank() > 1) {
      // Those behind the missing rank came, too, and say so. Their own time is no matter: rank 0 finds out.
      EXPECT_THAT(message_of<CommError>([&] { group.monitored_barrier(1ms); }),
                  AllOf(HasSubstr(concat("rank ", group.rank(), " reached the monitored barrier")),
                        HasSubstr("failed waiting on rank 0")));
    }
    end.wait();
  });
}

// spec: test_monitored_barrier_failure_order
TEST(MonitoredBarrier, NamesTheLowestRankThatStaysAway) {
  Meeting end(4);
  run_ranks(4, [&](Group& group) {
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

TEST(DebugDetail, NamesTheRankThatStaysAwayFromACollective) {
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
