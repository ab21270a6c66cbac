#include "chorale/graph/passes/stripe.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/graph/passes/recompute.h"
#include "chorale/graph/stripes.h"

namespace chorale::graph {
namespace {

Graph striped(const std::string& text) {
  Graph graph = parse(text);
  verify(graph);
  run_in_stripes(graph);
  verify(graph);
  EXPECT_EQ(print(parse(print(graph))), print(graph));
  return graph;
}

// A layer, its loss over `classes`, and the gradients of both.
std::string layer_with_loss(int lines, int classes, const std::string& dtype, const std::string& attrs) {
  const auto f = [&](const std::string& sizes) { return dtype + "[" + sizes + "]"; };
  const std::string n = std::to_string(lines), k = std::to_string(classes);
  return concat("graph(%0: ", f(n + ", 8"), ", %1: ", f(k + ", 8"), ", %2: ", f(k), ", %3: i64[", n, "]) {\n",      //
                "  %4: ", f(n + ", " + k), " = linear(%0, %1, %2)\n",                                               //
                "  %5: ", f(""), ", %6: f64[", n, "] = cross_entropy(%4, %3, none) ", attrs, "\n",                  //
                "  %7: ", f(""), " = full() {sizes=[], value=0.5, dtype=", dtype, ", device=0, device_index=0}\n",  //
                "  %8: ", f(n + ", " + k), " = cross_entropy_backward(%7, %4, %3, none, %6) ", attrs, "\n",         //
                "  %9: ", f(n + ", 8"), " = matmul(%8, %1)\n",                                                      //
                "  %10: ", f(k + ", " + n), ":[1, ", k, "] = permute(%8) {dims=[1, 0]}\n",                          //
                "  %11: ", f(k + ", 8"), " = matmul(%10, %0)\n",                                                    //
                "  %12: ", f(k), " = sum(%8) {dims=[0], keepdim=false}\n  return %5, %9, %11, %12\n}\n");
}
constexpr const char* kMeanLoss = "{ignore_index=-100, label_smoothing=0.0, reduction=1}";

TEST(Stripe, ALossTakesItsLayerAlong) {
  EXPECT_EQ(print(striped(layer_with_loss(4096, 2048, "f32", kMeanLoss))),
            R"(graph(%0: f32[4096, 8], %1: f32[2048, 8], %2: f32[2048], %3: i64[4096]) {
  %4: f32[] = full() {sizes=[], value=0.5, dtype=f32, device=0, device_index=0}
  %5: f32[], %6: f32[4096, 8], %7: f32[2048, 8], %8: f32[2048] = fused(%0, %1, %2, %3, %4) (%0: f32[4096, 8], %1: f32[2048, 8], %2: f32[2048], %3: i64[4096], %4: f32[]) {
    %5: f32[4096, 2048] = linear(%0, %1, %2)
    %6: f32[], %7: f64[4096] = cross_entropy(%5, %3, none) {ignore_index=-100, label_smoothing=0.0, reduction=1}
    %8: f32[4096, 2048] = cross_entropy_backward(%4, %5, %3, none, %7) {ignore_index=-100, label_smoothing=0.0, reduction=1}
    %9: f32[4096, 8] = matmul(%8, %1)
    %10: f32[2048, 4096]:[1, 2048] = permute(%8) {dims=[1, 0]}
    %11: f32[2048, 8] = matmul(%10, %0)
    %12: f32[2048] = sum(%8) {dims=[0], keepdim=false}
    return %6, %9, %11, %12
  }
  return %5, %6, %7, %8
}
)");
}

// However little memory there is, a loss is not computed again, for it takes none where it runs in stripes.
TEST(Stripe, ALossIsNotComputedAgain) {
  Graph graph = parse(layer_with_loss(4096, 2048, "f32", kMeanLoss));
  const std::string before = print(graph);
  recompute(graph, 0);
  EXPECT_EQ(print(graph), before);
}

// A small loss is left alone, and so is one whose logits are wanted besides.
TEST(Stripe, LeavesSmallLossesAndLogitsThatAreReadElsewhere) {
  const std::string small = layer_with_loss(64, 32, "f32", kMeanLoss);
  EXPECT_EQ(print(striped(small)), small);
  std::string wanted = layer_with_loss(4096, 2048, "f32", kMeanLoss);
  wanted.replace(wanted.find("return %5"), 9, "return %4, %5");
  const Graph graph = striped(wanted);
  for (const Node& node : graph.nodes) {
    if (node.kind != Node::Kind::kFused) continue;
    EXPECT_NE(print(*node.body).find("cross_entropy("), std::string::npos);
    EXPECT_EQ(print(*node.body).find("linear("), std::string::npos);
  }
}

std::vector<Tensor> run(const Graph& graph, const std::vector<Tensor>& in, bool in_stripes) {
  const FusedKernels kernels = [](const Node& node) { return striped_kernel(node, {}); };
  const Program program(graph, in_stripes ? kernels : FusedKernels{});
  std::vector<Tensor> out(graph.outputs.size());
  program.run(in, {}, out);
  return out;
}

void expect_near(const Tensor& a, const Tensor& b, double tolerance) {
  const auto x = to(a, DType::kF64).to_vector<double>(), y = to(b, DType::kF64).to_vector<double>();
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], tolerance * (1e-2 + std::abs(y[i]))) << i;
}

// Lines that do not fill the last stripe, targets that do not count, smoothing; mean and sum.
TEST(Stripe, ALossInStripesIsTheLoss) {
  constexpr int kLines = 5003, kClasses = 1000;
  std::vector<int64_t> classes(kLines);
  for (int i = 0; i < kLines; ++i) classes[static_cast<size_t>(i)] = i % 7 == 3 ? -100 : i * 31 % kClasses;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const char* attrs : {kMeanLoss, "{ignore_index=-100, label_smoothing=0.125, reduction=2}"}) {
      const std::string text = layer_with_loss(kLines, kClasses, std::string(name_of(dtype)), attrs);
      const std::vector<Tensor> in{to(uniform({kLines, 8}), dtype), to(uniform({kClasses, 8}), dtype),
                                   to(uniform({kClasses}), dtype), Tensor::from(classes, {kLines})};
      const Graph graph = striped(text);
      ASSERT_LT(graph.nodes.size(), 3u);
      const std::vector<Tensor> expected = run(parse(text), in, false);
      for (int again = 0; again < 2; ++again) {
        const std::vector<Tensor> made = run(graph, in, true);
        EXPECT_EQ(made[0].item<double>(), expected[0].item<double>());
        for (size_t i = 1; i < made.size(); ++i) expect_near(made[i], expected[i], dtype == DType::kF32 ? 1e-4 : 1e-11);
      }
    }
  }
}

// Logits of a sequence are seen through views, by the loss, by its gradient and by the products; a view of the layer's
// operand comes late.
TEST(Stripe, ALossOfSequencesTakesItsLayerAlong) {
  const std::string text = concat(R"(graph(%0: f32[32, 128, 8], %1: f32[2048, 8], %2: f32[2048], %3: i64[4096]) {
  %4: f32[32, 128, 2048] = linear(%0, %1, %2)
  %5: f32[4096, 2048] = view(%4) {sizes=[4096, 2048]}
  %6: f32[], %7: f64[4096] = cross_entropy(%5, %3, none) )",
                                  kMeanLoss, R"(
  %8: f32[] = full() {sizes=[], value=0.5, dtype=f32, device=0, device_index=0}
  %9: f32[4096, 2048] = cross_entropy_backward(%8, %5, %3, none, %7) )",
                                  kMeanLoss, R"(
  %10: f32[32, 128, 2048] = view(%9) {sizes=[32, 128, 2048]}
  %11: f32[4096, 2048] = view(%10) {sizes=[4096, 2048]}
  %12: f32[4096, 8] = matmul(%11, %1)
  %13: f32[32, 128, 8] = view(%12) {sizes=[32, 128, 8]}
  %14: f32[2048, 4096]:[1, 2048] = permute(%11) {dims=[1, 0]}
  %15: f32[4096, 8] = view(%0) {sizes=[4096, 8]}
  %16: f32[2048, 8] = matmul(%14, %15)
  %17: f32[2048] = sum(%11) {dims=[0], keepdim=false}
  return %6, %13, %16, %17
}
)");
  const Graph graph = striped(text);
  size_t fused = 0;
  for (const Node& node : graph.nodes) {
    if (node.kind != Node::Kind::kFused) continue;
    ++fused;
    EXPECT_NE(print(*node.body).find("linear("), std::string::npos);
  }
  ASSERT_EQ(fused, 1u);
  EXPECT_LT(Program(graph, [](const Node& node) { return striped_kernel(node, {}); }).plan().arena_bytes, 12 << 20)
      << "one stripe of 32 MiB of logits";
  const std::vector<Tensor> in{uniform({32, 128, 8}), uniform({2048, 8}), uniform({2048}), randint(0, 2048, {4096})};
  const std::vector<Tensor> expected = run(parse(text), in, false), made = run(graph, in, true);
  for (size_t i = 0; i < made.size(); ++i) expect_near(made[i], expected[i], 1e-4);
}

TEST(Stripe, ATargetThatIsNoClassIsNamed) {
  const Graph graph = striped(layer_with_loss(4096, 2048, "f32", kMeanLoss));
  std::vector<int64_t> classes(4096, 1);
  classes[4095] = 2048;
  const std::vector<Tensor> in{uniform({4096, 8}), uniform({2048, 8}), uniform({2048}), Tensor::from(classes, {4096})};
  try {
    run(graph, in, true);
    ADD_FAILURE() << "class 2048 of 2048 was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("target 2048 at place 4095 of 4096"), std::string::npos) << error.what();
  }
}

TEST(Stripe, WhatIsSummedIsAddedUpWhereItIsMade) {
  const std::string sums = R"(graph(%0: f32[30, 101, 256], %1: f32[256]) {
  %2: f32[30, 101, 256] = mul(%0, %1)
  %3: f32[3030, 256] = view(%2) {sizes=[3030, 256]}
  %4: f32[256] = sum(%3) {dims=[0], keepdim=false}
  %5: f32[1, 1, 256] = sum(%2) {dims=[1, 0], keepdim=true}
  return %2, %4, %5
}
)";
  const Graph graph = striped(sums);
  EXPECT_EQ(print(graph), R"(graph(%0: f32[30, 101, 256], %1: f32[256]) {
  %2: f32[30, 101, 256], %3: f32[256], %4: f32[1, 1, 256] = fused(%0, %1) (%0: f32[30, 101, 256], %1: f32[256]) {
    %2: f32[30, 101, 256] = mul(%0, %1)
    %3: f32[3030, 256] = view(%2) {sizes=[3030, 256]}
    %4: f32[256] = sum(%3) {dims=[0], keepdim=false}
    %5: f32[1, 1, 256] = sum(%2) {dims=[1, 0], keepdim=true}
    return %2, %4, %5
  }
  return %2, %3, %4
}
)");
  // Small integers: sums are exact in any order.
  const std::vector<Tensor> in{to(randint(-4, 5, {30, 101, 256}), DType::kF32), to(randint(-3, 4, {256}), DType::kF32)};
  const std::vector<Tensor> expected = run(parse(sums), in, false), made = run(graph, in, true);
  for (size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].sizes(), expected[i].sizes());
    EXPECT_EQ(made[i].to_vector<float>(), expected[i].to_vector<float>()) << i;
  }
}

}  // namespace
}  // namespace chorale::graph
