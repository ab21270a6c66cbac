#include "chorale/graph/blocks.h"

#include <gtest/gtest.h>

namespace chorale::graph {
namespace {

// Indexed by operand, then by result.
std::vector<std::vector<bool>> may_lie_over(const char* text) {
  const Graph graph = parse(text);
  const Node& block = graph.nodes[0];
  std::vector<std::vector<bool>> all(block.in.size());
  for (size_t i = 0; i < block.in.size(); ++i) {
    for (size_t o = 0; o < block.out.size(); ++o) all[i].push_back(may_lie_over(block, i, o));
  }
  return all;
}

using Table = std::vector<std::vector<bool>>;

TEST(BlockMemory, AnOperandIsOverwrittenOnceNothingReadsIt) {
  // %3 is written when %1 is read no more, by an elementwise node; %0 is read behind it.
  EXPECT_EQ(may_lie_over(R"(graph(%0: f32[4, 4], %1: f32[4, 4]) {
  %2: f32[4, 4], %3: f32[4, 4] = block(%0, %1) (%0: f32[4, 4], %1: f32[4, 4]) {
    %2: f32[4, 4] = relu(%1)
    %3: f32[4, 4] = matmul(%2, %0)
    return %2, %3
  }
  return %2, %3
}
)"),
            (Table{{false, false}, {true, true}}));
}

TEST(BlockMemory, ViewsAreReadsOfWhatTheyShow) {
  EXPECT_EQ(may_lie_over(R"(graph(%0: f32[4, 4]) {
  %1: f32[4, 4], %2: f32[4, 4] = block(%0) (%0: f32[4, 4]) {
    %1: f32[4, 4]:[1, 4] = permute(%0) {dims=[1, 0]}
    %2: f32[4, 4] = relu(%0)
    %3: f32[4, 4] = matmul(%2, %1)
    return %2, %3
  }
  return %1, %2
}
)"),
            (Table{{false, false}}));
}

TEST(BlockMemory, UpdatesWriteEachOverItsOwn) {
  // lr, two parameters, two gradients, two steps: new values of parameters, then of steps.
  EXPECT_EQ(may_lie_over(R"(graph(%0: f64[], %1: f32[3], %2: f32[3], %3: f32[3], %4: f32[3], %5: i64[], %6: i64[]) {
  %7: f32[3], %8: f32[3], %9: i64[], %10: i64[] = block(%0, %1, %2, %3, %4, %5, %6) (%0: f64[], %1: f32[3], %2: f32[3], %3: f32[3], %4: f32[3], %5: i64[], %6: i64[]) {
    %7: f32[3], %8: f32[3], %9: i64[], %10: i64[] = update_sgd(%0, none, %1, %2, %3, %4, %5, %6) {momentum=0, dampening=0, weight_decay=0, nesterov=false, maximize=false, masters=false}
    return %7, %8, %9, %10
  }
  return %7 -> %1, %8 -> %2, %9 -> %5, %10 -> %6
}
)"),
            (Table{{false, false, false, false},
                   {true, false, false, false},
                   {false, true, false, false},
                   {false, false, false, false},
                   {false, false, false, false},
                   {false, false, true, false},
                   {false, false, false, true}}));
}

}  // namespace
}  // namespace chorale::graph
