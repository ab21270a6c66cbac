#include "chorale/comm/group.h"

#include <gtest/gtest.h>

#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

TEST(AllReduce, SumIsExactForAnyRankCount) {
  for (int size : sizes_to_run({1, 2, 3, 5, 8})) {
    run_ranks(size, [](Group& group) {
      for (size_t count : {0u, 1u, 3u, 17u, 1000u, 65537u}) {
        // Small integers: every partial sum is exact, so the order of additions cannot matter.
        std::vector<float> x(count, static_cast<float>(group.rank() + 1));
        group.all_reduce(std::span(x), Reduce::kSum).synchronize(within(5s));
        const auto expected = static_cast<float>(group.size() * (group.size() + 1)) / 2;
        EXPECT_EQ(x, std::vector<float>(count, expected));
      }
    });
  }
}

}  // namespace
}  // namespace chorale::comm
