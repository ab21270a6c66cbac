#include "chorale/graph/passes/epilogues.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/graph/products.h"

namespace chorale::graph {
namespace {

constexpr const char* kLayers = R"(graph(%0: f32[40, 64], %1: f32[96, 64], %2: f32[96], %3: f32[96, 96]) {
  %4: f32[40, 96] = linear(%0, %1, %2)
  %5: f32[40, 96] = relu(%4)
  %6: f32[40, 96] = matmul(%5, %3)
  %7: f32[40, 96] = gelu_erf(%6)
  %8: f32[40, 96] = linear(%7, %3, none)
  %9: f32[40, 96] = relu(%8)
  return %9, %8
}
)";

// The last product is a result itself and stays alone.
TEST(Epilogues, AreJoinedWithWhatTheyAloneRead) {
  Graph graph = parse(kLayers);
  join_epilogues(graph);
  verify(graph);
  EXPECT_EQ(print(graph), R"(graph(%0: f32[40, 64], %1: f32[96, 64], %2: f32[96], %3: f32[96, 96]) {
  %4: f32[40, 96] = fused(%0, %1, %2) (%0: f32[40, 64], %1: f32[96, 64], %2: f32[96]) {
    %3: f32[40, 96] = linear(%0, %1, %2)
    %4: f32[40, 96] = relu(%3)
    return %4
  }
  %5: f32[40, 96] = fused(%4, %3) (%0: f32[40, 96], %1: f32[96, 96]) {
    %2: f32[40, 96] = matmul(%0, %1)
    %3: f32[40, 96] = gelu_erf(%2)
    return %3
  }
  %6: f32[40, 96] = linear(%5, %3, none)
  %7: f32[40, 96] = relu(%6)
  return %7, %6
}
)");
}

TEST(Epilogues, GiveWhatTheOpsGive) {
  const std::vector<Tensor> in{normal({40, 64}), normal({96, 64}), normal({96}), normal({96, 96})};
  std::vector<Tensor> expected(2);
  Program(parse(kLayers)).run(in, {}, expected);
  Graph graph = parse(kLayers);
  join_epilogues(graph);
  for (const auto form :
       {kernel::cpu::ProductForm::kByShape, kernel::cpu::ProductForm::kGemm, kernel::cpu::ProductForm::kPrimitive}) {
    const Program program(graph, [&](const Node& node) { return product_kernel(node, form); });
    for (int again = 0; again < 2; ++again) {
      std::vector<Tensor> made(2);
      program.run(in, {}, made);
      for (size_t o = 0; o < made.size(); ++o) {
        const std::vector<float> x = made[o].to_vector<float>(), y = expected[o].to_vector<float>();
        for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 1e-3 + 1e-5 * std::abs(y[i])) << o;
      }
    }
  }
}

}  // namespace
}  // namespace chorale::graph
