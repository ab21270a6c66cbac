#include "chorale/graph/passes/common_values.h"

#include <gtest/gtest.h>

namespace chorale::graph {
namespace {

TEST(CommonValues, AreComputedOnce) {
  Graph graph = parse(
      "graph(%0: f32[2, 3], %1: f32[2, 3]) {\n"
      "  %2: f32[3, 2]:[1, 3] = permute(%0) {dims=[1, 0]}\n"
      "  %3: f32[2, 3] = add(%0, %1)\n"
      "  %4: f32[3, 2]:[1, 3] = permute(%0) {dims=[1, 0]}\n"
      "  %5: f32[2, 3] = sub(%0, %1)\n"
      "  %6: f32[2, 2] = matmul(%3, %2)\n"
      "  %7: f32[2, 2] = matmul(%3, %4)\n"
      "  %8: f32[2, 2] = mul(%6, %7)\n"
      "  return %8, %5, %7\n"
      "}\n");
  verify(graph);
  merge_common_values(graph);
  verify(graph);
  EXPECT_EQ(print(graph),
            "graph(%0: f32[2, 3], %1: f32[2, 3]) {\n"
            "  %2: f32[3, 2]:[1, 3] = permute(%0) {dims=[1, 0]}\n"
            "  %3: f32[2, 3] = add(%0, %1)\n"
            "  %4: f32[2, 3] = sub(%0, %1)\n"
            "  %5: f32[2, 2] = matmul(%3, %2)\n"
            "  %6: f32[2, 2] = mul(%5, %5)\n"
            "  return %6, %4, %5\n"
            "}\n");
}

TEST(CommonValues, DrawsAreNot) {
  const std::string text =
      "graph() {\n"
      "  %0: i64[2] = draw(g0, 4)\n"
      "  %1: i64[2] = draw(g0, 4)\n"
      "  %2: f32[3] = uniform(%0) {sizes=[3], a=0.0, b=1.0, dtype=f32}\n"
      "  %3: f32[3] = uniform(%1) {sizes=[3], a=0.0, b=1.0, dtype=f32}\n"
      "  return %2, %3\n"
      "}\n";
  Graph graph = parse(text);
  merge_common_values(graph);
  EXPECT_EQ(print(graph), text);
}

}  // namespace
}  // namespace chorale::graph
