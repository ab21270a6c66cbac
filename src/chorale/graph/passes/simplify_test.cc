#include "chorale/graph/passes/simplify.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::graph {
namespace {

std::string simplified(const std::string& text) {
  Graph graph = parse(text);
  verify(graph);
  simplify(graph);
  verify(graph);
  return print(graph);
}

TEST(Simplify, DropsCopiesAndViewsThatChangeNothing) {
  EXPECT_EQ(simplified(R"(graph(%0: f32[2, 3], %1: f32[3, 2]:[1, 3]) {
  %2: f32[2, 3] = view(%0) {sizes=[2, 3]}
  %3: f32[2, 3] = neg(%2)
  %4: f32[2, 3] = to(%3) {dtype=f32, keep_layout=false}
  %5: f32[3, 2] = to(%1) {dtype=f32, keep_layout=false}
  %6: bf16[2, 3] = to(%4) {dtype=bf16, keep_layout=false}
  return %4, %5, %6
}
)"),
            R"(graph(%0: f32[2, 3], %1: f32[3, 2]:[1, 3]) {
  %2: f32[2, 3] = neg(%0)
  %3: f32[3, 2] = to(%1) {dtype=f32, keep_layout=false}
  %4: bf16[2, 3] = to(%2) {dtype=bf16, keep_layout=false}
  return %2, %3, %4
}
)");
}

// Four rows as the first `above` of them and the last `below`, added; `more` is returned besides the sum.
std::string sum_of_parts(int above, int below, const char* more) {
  const auto part = [](int y, int x, int start, int end) {
    return concat("  %", y, ": f32[4, 4] = slice_backward(%", x, ") {sizes=[4, 4], dim=0, start=", start, ", end=", end,
                  ", step=1}\n");
  };
  return concat("graph(%0: f32[", above, ", 4], %1: f32[", below, ", 4]) {\n", part(2, 0, 0, above),
                part(3, 1, 4 - below, 4), "  %4: f32[4, 4] = add(%2, %3)\n  return %4", more, "\n}\n");
}

// Parts in any order of addition; a hole, an overlap or another reader leaves the sum what it is.
TEST(Simplify, JoinsPartsThatCoverEverything) {
  EXPECT_EQ(simplified(R"(graph(%0: f32[1, 4], %1: f32[2, 4], %2: f32[1, 4]) {
  %3: f32[4, 4] = slice_backward(%0) {sizes=[4, 4], dim=0, start=0, end=1, step=1}
  %4: f32[4, 4] = slice_backward(%1) {sizes=[4, 4], dim=0, start=2, end=9223372036854775807, step=1}
  %5: f32[4, 4] = add(%3, %4)
  %6: f32[4, 4] = slice_backward(%2) {sizes=[4, 4], dim=-2, start=-3, end=-2, step=1}
  %7: f32[4, 4] = add(%5, %6)
  %8: f32[4, 4]:[1, 4] = permute(%7) {dims=[1, 0]}
  %9: f32[4, 4] = to(%8) {dtype=f32, keep_layout=false}
  return %9
}
)"),
            R"(graph(%0: f32[1, 4], %1: f32[2, 4], %2: f32[1, 4]) {
  %3: f32[4, 1]:[1, 4] = permute(%0) {dims=[1, 0]}
  %4: f32[4, 1]:[1, 4] = permute(%2) {dims=[1, 0]}
  %5: f32[4, 2]:[1, 4] = permute(%1) {dims=[1, 0]}
  %6: f32[4, 4] = cat(%3, %4, %5) {dim=1}
  return %6
}
)");
  const std::string hole = sum_of_parts(1, 2, "");
  EXPECT_EQ(simplified(hole), hole);
  const std::string overlap = sum_of_parts(3, 2, "");
  EXPECT_EQ(simplified(overlap), overlap);
  const std::string read_elsewhere = sum_of_parts(2, 2, ", %2");
  EXPECT_EQ(simplified(read_elsewhere), read_elsewhere);
}

}  // namespace
}  // namespace chorale::graph
