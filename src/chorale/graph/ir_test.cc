#include "chorale/graph/ir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/base/scalar.h"
#include "chorale/graph/symbolic.h"

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

// The text of a function of n rows, as print() gives it.
std::string text_at(int64_t n) {
  return concat("graph(%0: f32[", n, ", 3], %1: f32[", n * n, "]:[", n + 2, "]) {\n  %2: f32[", 2 * n,
                ", 3] = cat(%0, %0) {dim=0}\n  %3: f32[", n / 2, ", 3] = narrow(%2) {dim=0, start=0, length=", n / 2,
                "}\n  %4: f32[", n / 2, ", 3] = mul(%3) {b=", to_text(3.0 / static_cast<double>(n)),
                "}\n  %5: i64[2] = draw(g0, 12)\n  return %4\n}\n");
}

TEST(SymbolicGraph, IsLearntFromTwoSizesAndHoldsForOthers) {
  const std::vector<SymbolicText::Example> two = {{{20}, text_at(20)}, {{30}, text_at(30)}};
  std::string why;
  const std::optional<SymbolicText> learnt = SymbolicText::learn(two, {"s0"}, why);
  ASSERT_TRUE(learnt) << why;
  EXPECT_EQ(learnt->text(),
            "graph[s0=30](%0: f32[s0, 3], %1: f32[s0*s0]:[s0+2]) {\n  %2: f32[2*s0, 3] = cat(%0, %0) {dim=0}\n"
            "  %3: f32[s0/2, 3] = narrow(%2) {dim=0, start=0, length=s0/2}\n"
            "  %4: f32[s0/2, 3] = mul(%3) {b=3.0/s0}\n  %5: i64[2] = draw(g0, 12)\n  return %4\n}\n");
  for (const int64_t n : {2, 31, 1000}) {
    EXPECT_EQ(learnt->mismatch(text_at(n), std::vector{n}), "");
    EXPECT_EQ(learnt->at(std::vector{n}), text_at(n));
  }
  const SymbolicText parsed = SymbolicText::parse(learnt->text());
  EXPECT_EQ(parsed.text(), learnt->text());
  EXPECT_EQ(parsed.at(std::vector<int64_t>{77}), text_at(77));
  std::string other = text_at(40);
  other.replace(other.find("dim=0"), 5, "dim=1");
  EXPECT_EQ(learnt->mismatch(other, std::vector<int64_t>{40}),
            "`%2: f32[80, 3] = cat(%0, %0) {dim=1}` instead of `%2: f32[80, 3] = cat(%0, %0) {dim=0}`");
}

TEST(SymbolicGraph, IsNoneWhereTextsDifferInMoreThanNumbers) {
  std::string why;
  const std::vector<SymbolicText::Example> two = {{{20}, "graph(%0: f32[20]) {\n  %1: f32[20] = neg(%0)\n"},
                                                  {{30}, "graph(%0: f32[30]) {\n  %1: f32[30] = abs(%0)\n"}};
  EXPECT_FALSE(SymbolicText::learn(two, {"s0"}, why));
  EXPECT_EQ(why, "`%1: f32[30] = abs(%0)` instead of `%1: f32[20] = neg(%0)`");
}

TEST(SymbolicGraph, TellsSymbolsApart) {
  const auto at = [](int64_t a, int64_t b) {
    return concat("graph(%0: f32[", a, ", ", b, ", ", a * b, ", ", 3 * b, "]");
  };
  const std::vector<SymbolicText::Example> two = {{{4, 10}, at(4, 10)}, {{6, 9}, at(6, 9)}};
  std::string why;
  const std::optional<SymbolicText> learnt = SymbolicText::learn(two, {"s0", "s1"}, why);
  ASSERT_TRUE(learnt) << why;
  EXPECT_EQ(learnt->text(), "graph[s0=6, s1=9](%0: f32[s0, s1, s0*s1, 3*s1]");
  EXPECT_EQ(learnt->mismatch(at(11, 2), std::vector<int64_t>{11, 2}), "");
  EXPECT_THAT(learnt->mismatch(at(11, 2), std::vector<int64_t>{11, 3}), HasSubstr("instead of"));
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
