#include "chorale/comm/progress_thread.h"

#include <gtest/gtest.h>

#include <atomic>

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

}  // namespace
}  // namespace chorale::comm
