#include "chorale/graph/plan.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/graph/program.h"

namespace chorale::graph {
namespace {

TEST(Plan, ValuesThatLiveAtDifferentTimesShareBytes) {
  // Softmax and sort are not done in place: two values live at a time, whatever the length of the chain.
  std::string text = "graph(%0: f32[64, 4]) {\n";
  int last = 0;
  for (int i = 0; i < 6; ++i, ++last) {
    text += "  %" + std::to_string(last + 1) + ": f32[64, 4] = softmax(%" + std::to_string(last) + ") {dim=1}\n";
  }
  text += "  return %" + std::to_string(last) + "\n}\n";
  const Graph graph = parse(text);
  verify(graph);
  const Plan plan = plan_memory(graph);
  EXPECT_EQ(plan.arena_bytes, 2 * 64 * 4 * 4);
  EXPECT_EQ(plan.sum_bytes, 5 * 64 * 4 * 4);
}

TEST(Plan, APointwiseOpWritesOverAnOperandThatNothingReadsLater) {
  const Graph graph = parse(
      "graph(%0: f32[32]) {\n  %1: f32[32] = exp(%0)\n  %2: f32[32] = neg(%1)\n  %3: f32[32] = abs(%2)\n"
      "  %4: f32[32] = softmax(%3) {dim=0}\n  return %4\n}\n");
  const Plan plan = plan_memory(graph);
  EXPECT_EQ(plan.places[1].offset, plan.places[3].offset);
  EXPECT_EQ(plan.arena_bytes, 128);
}

// Logits, the largest values of a language model, are there once.
TEST(Plan, TheGradientOfLogitsLiesOverThem) {
  const std::string attrs = "{ignore_index=-100, label_smoothing=0.1, reduction=1}";
  for (const bool keeps : {false, true}) {
    const Graph graph = parse(concat("graph(%0: f32[5, 37], %1: i64[5]) {\n  %2: f32[5, 37] = neg(%0)\n",        //
                                     "  %3: f32[], %4: f64[5] = cross_entropy(%2, %1, none) ", attrs,            //
                                     "\n  %5: f32[] = full_like(%3) {value=1}\n",                                //
                                     "  %6: f32[5, 37] = cross_entropy_backward(%5, %2, %1, none, %4) ", attrs,  //
                                     "\n  %7: f32[5, 37] = mul(%6, ", keeps ? "%2" : "%6", ")\n  return %3, %7\n}\n"));
    verify(graph);
    const Plan plan = plan_memory(graph);
    EXPECT_EQ(plan.places[2].in == plan.places[6].in && plan.places[2].offset == plan.places[6].offset, !keeps);
    const Tensor x = set_requires_grad(uniform({5, 37})), y = Tensor::from<int64_t>({3, 36, -100, 0, 8}, {5});
    const Tensor logits = set_requires_grad(neg(detach(x))),
                 loss = cross_entropy(logits, y, {}, Reduction::kMean, -100, 0.1);
    backward(loss);
    const Tensor expected = mul(gradient(logits), keeps ? detach(logits) : gradient(logits));
    const Program program(graph);
    std::vector<Tensor> out(2);
    program.run(std::vector<Tensor>{x, y}, {}, out);
    EXPECT_EQ(out[0].item<float>(), loss.item<float>());
    EXPECT_EQ(out[1].to_vector<float>(), expected.to_vector<float>());
  }
}

TEST(Plan, WhatAnInputIsOverwrittenWithLiesInItFromTheStart) {
  const Graph graph = parse("graph(%0: f32[2], %1: f32[2]) {\n  %2: f32[2] = add(%0, %1)\n  return %2 -> %0\n}\n");
  const Plan plan = plan_memory(graph);
  EXPECT_EQ(plan.places[2].in, Plan::In::kInput);
  EXPECT_EQ(plan.places[2].index, 0u);
  EXPECT_FALSE(plan.copied[0]);
}

// %0 is read after its successor has been made.
TEST(Plan, ButNotWhereTheOldValueIsReadLater) {
  const Graph graph =
      parse("graph(%0: f32[2]) {\n  %1: f32[2] = neg(%0)\n  %2: f32[2] = mul(%1, %0)\n  return %2, %1 -> %0\n}\n");
  EXPECT_TRUE(plan_memory(graph).copied[1]);
  const Program program(graph);
  const Tensor x = Tensor::from<float>({2, 3}, {2});
  std::vector<Tensor> out(2);
  program.run(std::vector<Tensor>{x}, {}, out);
  EXPECT_EQ(out[0].to_vector<float>(), (std::vector<float>{-4, -9}));
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{-2, -3}));
}

TEST(Program, WritesAPartOverACopyOrInPlace) {
  for (const bool keeps : {false, true}) {
    const std::string text = std::string(
                                 "graph(%0: f32[4], %1: f32[2]) {\n  %2: f32[4] = softmax(%0) {dim=0}\n"
                                 "  %3: f32[4] = write(%2, %1) {sizes=[2], strides=[2], offset=1}\n  return %3") +
                             (keeps ? ", %2" : "") + "\n}\n";
    const Graph graph = parse(text);
    verify(graph);
    const Program program(graph);
    std::vector<Tensor> out(keeps ? 2 : 1);
    program.run(std::vector<Tensor>{zeros({4}), Tensor::from<float>({5, 6}, {2})}, {}, out);
    EXPECT_EQ(out[0].to_vector<float>(), (std::vector<float>{0.25, 5, 0.25, 6}));
    if (!keeps) continue;
    EXPECT_EQ(out[1].to_vector<float>(), (std::vector<float>{0.25, 0.25, 0.25, 0.25}));
  }
}

TEST(Program, TwoOutputsOfOneValueHaveMemoryOfTheirOwn) {
  const Program program(parse("graph(%0: f32[2]) {\n  %1: f32[2] = neg(%0)\n  return %1, %1, %0\n}\n"));
  std::vector<Tensor> out(3);
  const Tensor x = ones({2});
  program.run(std::vector<Tensor>{x}, {}, out);
  EXPECT_NE(out[0].raw(), out[1].raw());
  EXPECT_NE(out[2].raw(), x.raw());
  EXPECT_EQ(out[1].to_vector<float>(), (std::vector<float>{-1, -1}));
  EXPECT_EQ(out[2].to_vector<float>(), (std::vector<float>{1, 1}));
}

}  // namespace
}  // namespace chorale::graph
