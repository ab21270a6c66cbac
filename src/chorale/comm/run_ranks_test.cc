// How tests run ranks, and how a rank's end is told.
#include "chorale/comm/run_ranks_test_util.h"

#include <gtest/gtest.h>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

const GroupOptions kMinute{.timeout = 60s};

// spec: harness_launch
TEST(RankProcesses, EndWellTogether) {
  for (int size : {1, 3}) {
    EXPECT_EQ(run_processes(
                  size,
                  [size](Group& group) {
                    EXPECT_EQ(group.size(), size);
                    EXPECT_EQ(group.timeout(), 60s);
                    group.barrier().wait();
                    int32_t one = 1;
                    group.all_reduce(std::span(&one, 1)).wait();
                    EXPECT_EQ(one, size);
                    group.barrier().wait();
                    group.destroy();
                  },
                  kMinute),
              std::vector<int>(static_cast<size_t>(size), 0));
  }
}

TEST(RankProcesses, AnErrorOfOneEndsAll) {
  const std::vector<int> ends = run_processes(
      3,
      [](Group& group) {
        group.barrier().wait();
        if (group.rank() == 1) throw StateError("this rank has had enough");
        group.barrier().wait();
      },
      kMinute);
  EXPECT_EQ(ends, (std::vector<int>{1, 1, 1}));
}

TEST(RankProcesses, APartThatIsNotThereIsSkippedByAll) {
  constexpr SharedObject kNowhere{"nowhere", 1, "libnowhere-dev", "libnowhere", false};
  const std::vector<int> ends = run_processes(2, [&](Group& group) {
    group.barrier().wait();
    if (const Availability there = shared_object_availability(kNowhere); !there.yes) GTEST_SKIP() << there.reason;
  });
  EXPECT_EQ(ends, (std::vector<int>{kSkipped, kSkipped}));
}

}  // namespace
}  // namespace chorale::comm
