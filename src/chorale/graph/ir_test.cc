#include "chorale/graph/ir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::graph {
namespace {

using testing::HasSubstr;

constexpr const char* kText =
    "graph(%0: f32[2, 3], %1: f32[3], %2: bf16[4, 2]:[1, 4]) {\n"
    "  %3: f32[2, 3] = add(%0, %1)\n"
    "  %4: i64[2] = draw(g0, 12)\n"
    "  %5: f32[2, 3] = write(%3, %1) {sizes=[3], strides=[1], offset=3}\n"
    "  %6: f32[3, 2]:[1, 3] = permute(%5) {dims=[1, 0]}\n"
    "  return %6, %5 -> %0\n"
    "}\n";

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(GraphText, IsWhatWasParsed) {
  const Graph graph = parse(kText);
  verify(graph);
  EXPECT_EQ(print(graph), kText);
  EXPECT_EQ(graph.outputs[1].into, 0u);
  EXPECT_EQ(graph.generators, 1u);
}

TEST(GraphText, NamesTheLineThatIsWrong) {
  EXPECT_THAT(message_of([] { parse("graph() {\n  %0: f32[2] = nonsense()\n  return\n}\n"); }),
              testing::AllOf(HasSubstr("line 2"), HasSubstr("an op of the table, not nonsense")));
  EXPECT_THAT(message_of([] { parse("graph(%0: f32[2]) {\n  return %0 -> %7\n}"); }), HasSubstr("an input behind ->"));
  EXPECT_THAT(message_of([] { parse("graph("); }), HasSubstr("line 1"));
}

TEST(GraphVerifier, FindsWhatIsWrong) {
  const auto wrong = [](const std::string& text) { return message_of([&] { verify(parse(text)); }); };
  EXPECT_THAT(wrong("graph(%0: f32[2]) { %1: f32[2] = neg(%2) return %1 }"), HasSubstr("before it is there"));
  EXPECT_THAT(wrong("graph(%0: f32[2]) { %0: f32[2] = neg(%0) return %0 }"), HasSubstr("exists already"));
  EXPECT_THAT(wrong("graph(%0: f32[2]) { %1: f32[3] = neg(%0) return %1 }"), HasSubstr("f32[2]"));
  EXPECT_THAT(wrong("graph(%0: f32[2]) { %1: f64[2] = neg(%0) return %1 }"), HasSubstr("f64[2]"));
  EXPECT_THAT(wrong("graph(%0: f32[2]) { %1: f32[2] = neg(%0) return %1 -> %0, %1 -> %0 }"),
              HasSubstr("written twice"));
  EXPECT_THAT(wrong("graph(%0: f32[2], %1: f32[3]) { return %1 -> %0 }"), HasSubstr("is written to an input of"));
}

TEST(DeadNodes, GoAndDrawsStay) {
  Graph graph = parse(
      "graph(%0: f32[2]) {\n  %1: f32[2] = neg(%0)\n  %2: i64[2] = draw(g0, 4)\n  %3: f32[2] = abs(%0)\n  return "
      "%3\n}\n");
  remove_dead_nodes(graph);
  EXPECT_EQ(print(graph), "graph(%0: f32[2]) {\n  %1: i64[2] = draw(g0, 4)\n  %2: f32[2] = abs(%0)\n  return %2\n}\n");
}

}  // namespace
}  // namespace chorale::graph
