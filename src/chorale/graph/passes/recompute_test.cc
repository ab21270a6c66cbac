#include "chorale/graph/passes/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/graph/program.h"

namespace chorale::graph {
namespace {

Graph recomputed(const std::string& text, double budget) {
  Graph graph = parse(text);
  verify(graph);
  recompute(graph, budget);
  verify(graph);
  return graph;
}

// The activation is cheap: what it is made of is kept, and it is made again where the gradient of the layer needs it.
TEST(Recompute, MakesWhatIsCheapAgain) {
  EXPECT_EQ(print(recomputed(R"(graph(%0: f32[256, 256], %1: f32[256, 256]) {
  %2: f32[256, 256] = matmul(%0, %1)
  %3: f32[256, 256] = tanh(%2)
  %4: f32[256, 256] = matmul(%3, %1)
  %5: f32[256, 256] = softmax(%4) {dim=1}
  %6: f32[256, 256] = softmax_backward(%5, %4) {dim=1}
  %7: f32[256, 256] = matmul(%6, %3)
  %8: f32[256, 256] = matmul(%7, %2)
  return %8
}
)",
                             1)),
            R"(graph(%0: f32[256, 256], %1: f32[256, 256]) {
  %2: f32[256, 256] = matmul(%0, %1)
  %3: f32[256, 256] = tanh(%2)
  %4: f32[256, 256] = matmul(%3, %1)
  %5: f32[256, 256] = softmax(%4) {dim=1}
  %6: f32[256, 256] = softmax_backward(%5, %4) {dim=1}
  %7: f32[256, 256] = tanh(%2)
  %8: f32[256, 256] = matmul(%6, %7)
  %9: f32[256, 256] = matmul(%8, %2)
  return %9
}
)");
}

// A sum is not made again where one of its terms would have to be kept for that, which is as large.
TEST(Recompute, KeepsWhatCostsAsMuchToKeep) {
  const std::string text = R"(graph(%0: f32[256, 256], %1: f32[256, 256]) {
  %2: f32[256, 256] = matmul(%0, %1)
  %3: f32[256, 256] = add(%0, %2)
  %4: f32[256, 256] = matmul(%3, %1)
  %5: f32[256, 256] = softmax(%4) {dim=1}
  %6: f32[256, 256] = softmax_backward(%5, %4) {dim=1}
  %7: f32[256, 256] = matmul(%6, %3)
  return %7
}
)";
  EXPECT_EQ(print(recomputed(text, 1)), text);
}

// Three blocks, each with a product in it, and the same backwards.
std::string blocks() {
  const std::string m = "f32[256, 256]";
  std::string text = "graph(%0: " + m + ", %1: " + m + ") {\n";
  int at = 1;
  const auto line = [&](const std::string& op) {
    text += concat("  %", ++at, ": ", m, " = ", op, "\n");
    return concat("%", at);
  };
  std::string x = "%0";
  std::vector<std::vector<std::string>> kept;
  for (int b = 0; b < 3; ++b) {
    const std::string h = line(concat("matmul(", x, ", %1)")), g = line(concat("tanh(", h, ")")),
                      y = line(concat("matmul(", g, ", %1)")), s = line(concat("tanh(", y, ")"));
    kept.push_back({x, h, g, y});
    x = line(concat("add(", x, ", ", s, ")"));
  }
  std::string d = line(concat("softmax(", x, ") {dim=1}"));
  for (int b = 2; b >= 0; --b) {
    for (const std::string& v : {kept[static_cast<size_t>(b)][3], kept[static_cast<size_t>(b)][2],
                                 kept[static_cast<size_t>(b)][1], kept[static_cast<size_t>(b)][0]}) {
      d = line(concat("matmul(", d, ", ", v, ")"));
    }
  }
  return text + "  return " + d + "\n}\n";
}

TEST(Recompute, AllBudgetsGiveTheSameBitsInLessMemory) {
  const std::string text = blocks();
  const std::vector<Tensor> in{mul(uniform({256, 256}), 0.1), mul(uniform({256, 256}), 0.1)};
  const Program whole(parse(text));
  std::vector<Tensor> expected(1);
  whole.run(in, {}, expected);
  int64_t before = whole.plan().arena_bytes;
  for (const double budget : {1.0, 0.5, 0.0}) {
    const Program program(recomputed(text, budget));
    std::vector<Tensor> made(1);
    program.run(in, {}, made);
    EXPECT_EQ(made[0].to_vector<float>(), expected[0].to_vector<float>()) << budget;
    EXPECT_LE(program.plan().arena_bytes, before) << budget;
    before = program.plan().arena_bytes;
  }
  EXPECT_LT(before, whole.plan().arena_bytes * 4 / 5);
}

// A view of what is kept is read where it is, so that two readers see the same value.
TEST(Recompute, KeepsViewsOfWhatIsKept) {
  const std::string text = R"(graph(%0: f32[64, 512]) {
  %1: f32[64, 512] = softmax(%0) {dim=1}
  %2: f32[128, 256] = view(%1) {sizes=[128, 256]}
  %3: f32[128, 256] = softmax(%2) {dim=1}
  %4: f32[128, 256] = softmax_backward(%3, %3) {dim=1}
  %5: f32[128, 256] = softmax_backward(%4, %2) {dim=1}
  return %5
}
)";
  for (const double budget : {1.0, 0.0}) {
    size_t views = 0;
    for (const Node& node : recomputed(text, budget).nodes) {
      views += node.kind == Node::Kind::kRow && node.op->view ? 1 : 0;
    }
    EXPECT_EQ(views, 1u) << budget;
  }
}

// Random numbers are drawn once, whatever the budget.
TEST(Recompute, NeverDrawsTwice) {
  const std::string text = R"(graph(%0: f32[256, 256]) {
  %1: i64[2] = draw(g0, 65536)
  %2: f32[256, 256] = uniform(%1) {sizes=[256, 256], a=0.0, b=1.0, dtype=f32}
  %3: f32[256, 256] = mul(%0, %2)
  %4: f32[256, 256] = softmax(%3) {dim=1}
  %5: f32[256, 256] = softmax_backward(%4, %4) {dim=1}
  %6: f32[256, 256] = mul(%5, %2)
  return %6
}
)";
  for (const double budget : {1.0, 0.0}) {
    size_t draws = 0;
    for (const Node& node : recomputed(text, budget).nodes) draws += node.kind == Node::Kind::kDraw ? 1 : 0;
    EXPECT_EQ(draws, 1u);
  }
}

// Neither where the second half reads what was drawn, and it would take least memory to draw once more, nor a
// collective.
TEST(Recompute, NeverRepeatsDrawsAndCollectives) {
  const std::string text = R"(graph(%0: f32[256, 256], %1: i64[2], %2: f32[1]) {
  %3: i64[2] = draw(g0, 65536)
  %4: f32[256, 256] = dropout(%0, %3) {p=0.5}
  %5: f32[1] = add(%2, %2)
  %6: f32[1] = all_reduce(%5, %1) {kind=0, reduce=5, ranks=2, rank=0, dim=0, whole=0, other=0, root=0, factor=1.0}
  %7: f32[256, 256] = dropout(%4, %3) {p=0.5}
  %8: f32[256, 256] = mul(%7, %6)
  return %8
}
)";
  Graph graph = parse(text);
  for (const double budget : {0.0, 0.5}) {
    const std::vector<bool> again = choose_again(graph, 4, budget, {});
    EXPECT_FALSE(again[0]) << budget;
    EXPECT_FALSE(again[3]) << budget;
  }
}

// Two halves that become graphs of their own.
std::vector<bool> again_in(const std::string& nodes, uint32_t turn, double budget,
                           const std::vector<uint32_t>& overwritten = {}) {
  const Graph graph = parse("graph(%0: f32[256, 256], %1: f32[256, 256]) {\n" + nodes + "}\n");
  verify(graph);
  return choose_again(graph, turn, budget, overwritten);
}
using Again = std::vector<bool>;

// With all memory nothing is read that would not be read anyway, and never what the first half overwrites.
TEST(Recompute, BetweenGraphsInputsAreReadWhereThatIsAllowed) {
  const std::string from_inputs = R"(  %2: f32[256, 256] = matmul(%0, %0)
  %3: f32[256, 256] = add(%1, %1)
  %4: f32[256, 256] = softmax_backward(%2, %3) {dim=1}
)";
  EXPECT_EQ(again_in(from_inputs + "  return %4\n", 2, 1), (Again{false, false}));
  EXPECT_EQ(again_in(from_inputs + "  return %4\n", 2, 0), (Again{true, true}));
  EXPECT_EQ(again_in(from_inputs + "  return %4\n", 2, 0, {1}), (Again{true, false}));
  EXPECT_EQ(again_in(from_inputs + "  return %4\n", 2, 0, {0}), (Again{false, true}));
  const std::string reads_input = "  %5: f32[256, 256] = softmax_backward(%4, %1) {dim=1}\n  return %5\n";
  EXPECT_EQ(again_in(from_inputs + reads_input, 2, 1), (Again{false, true}));
}

// A result is the caller's, who may write to it.
TEST(Recompute, BetweenGraphsResultsAreReadWhereTheyWouldBeAnyway) {
  const std::string text = R"(  %2: f32[256, 1] = sum(%0) {dims=[1], keepdim=true}
  %3: f32[256, 256] = add(%0, %2)
  %4: f32[256, 256] = softmax_backward(%0, %3) {dim=1}
)";
  for (const double budget : {1.0, 0.0}) {
    EXPECT_EQ(again_in(text + "  return %4\n", 2, budget)[1], true);
    EXPECT_EQ(again_in(text + "  return %4, %2\n", 2, budget)[1], false);
    const std::string reads_it = "  %5: f32[256, 256] = add(%4, %2)\n  return %5, %2\n";
    EXPECT_EQ(again_in(text + reads_it, 2, budget)[1], true);
  }
}

// In a chain every value is as narrow as can be. A few are kept, and what lies between two of them is made again.
TEST(Recompute, OfALongChainSomeValuesAreKept) {
  constexpr int kLength = 16;
  std::string text;
  for (int i = 0; i < kLength; ++i) text += concat("  %", i + 2, ": f32[256, 256] = matmul(%", i + 1, ", %0)\n");
  std::string d = concat("%", kLength + 1);
  for (int i = 0; i < kLength; ++i) {
    text +=
        concat("  %", kLength + 2 + i, ": f32[256, 256] = softmax_backward(", d, ", %", kLength + 1 - i, ") {dim=1}\n");
    d = concat("%", kLength + 2 + i);
  }
  const Again again = again_in(text + "  return " + d + "\n", kLength, 0);
  const auto made = std::count(again.begin(), again.end(), true);
  EXPECT_GE(made, 10);
  EXPECT_LE(made, 13);
}

TEST(Recompute, ABudgetLiesBetweenNoughtAndOne) {
  Graph graph = parse(blocks());
  EXPECT_THROW(recompute(graph, 1.5), InvalidArgument);
  EXPECT_THROW(recompute(graph, -0.1), InvalidArgument);
}

}  // namespace
}  // namespace chorale::graph
