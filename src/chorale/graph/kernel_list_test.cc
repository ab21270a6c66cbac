#include "chorale/graph/kernel_list.h"

#include <gtest/gtest.h>

namespace chorale::graph {
namespace {

// Views run nothing. A product of 2 * 100 * 300 * 200 operations takes longer than its 440,000 bytes; the sum does not.
TEST(KernelList, SaysWhatRunsAndHowLongItShouldTake) {
  const Program program(parse(R"(graph(%0: f32[100, 200], %1: f32[300, 200]) {
  %2: f32[200, 300]:[1, 200] = permute(%1) {dims=[1, 0]}
  %3: f32[100, 300] = matmul(%0, %2)
  %4: f32[100, 300], %5: f32[100, 300] = fused(%3) (%0: f32[100, 300]) {
    %1: f32[100, 300] = relu(%0)
    %2: f32[100, 300] = neg(%1)
    return %1, %2
  }
  return %4, %5
}
)"));
  const std::vector<ListedKernel> kernels = list_kernels(program);
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_EQ(kernels[0].node, 1u);
  EXPECT_EQ(kernels[0].name, "matmul");
  EXPECT_EQ(kernels[0].bytes, 4 * (100 * 200 + 300 * 200 + 100 * 300));
  EXPECT_DOUBLE_EQ(kernels[0].microseconds, 2.0 * 100 * 300 * 200 / 1e5);
  EXPECT_EQ(kernels[1].name, "fused: relu, neg");
  EXPECT_EQ(kernels[1].bytes, 4 * 3 * 100 * 300);
  EXPECT_DOUBLE_EQ(kernels[1].microseconds, 4.0 * 3 * 100 * 300 / 1e4);
}

}  // namespace
}  // namespace chorale::graph
