// What a compiled function keeps for its backward, and what that computes again.
#include <gtest/gtest.h>

#include "chorale/api/compile.h"
#include "chorale/api/compile_test_util.h"
#include "chorale/autograd/checkpoint.h"
#include "chorale/base/error.h"

namespace chorale {
namespace {

Tensor wave(const Shape& sizes, double scale, double shift) {
  std::vector<double> all(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < all.size(); ++i) all[i] = scale * std::sin(1.7 * static_cast<double>(i) + shift);
  return to(Tensor::from(all, sizes), DType::kF32);
}

// Blocks of two products with an activation between them.
struct Blocks {
  Tensor up = set_requires_grad(wave({128, 128}, 0.1, 1)), down = set_requires_grad(wave({128, 128}, 0.1, 2));
  Tensor bias = set_requires_grad(wave({128}, 0.1, 3));
  Tensor operator()(const Tensor& in) const {
    Tensor x = in;
    for (int i = 0; i < 3; ++i) x = add(x, matmul(gelu(add(matmul(x, up), bias)), down));
    return x;
  }
  std::vector<Values> gradients() const {
    std::vector<Values> all;
    for (const Tensor& leaf : {up, down, bias}) {
      all.push_back(values(gradient(leaf)));
      set_gradient(leaf, {});
    }
    return all;
  }
};

// Bytes that forward graphs hand out, results included.
compiled::Backend watching(int64_t& bytes) {
  return [&bytes](graph::Graph graph, const compiled::GraphInfo& info) {
    graph::verify(graph);
    for (const graph::Output& output : graph.outputs) {
      if (!info.is_backward && output.into == graph::kNone) bytes += graph::bytes_of(graph.values[output.value]);
    }
    return compiled::joint_eager()(std::move(graph), info);
  };
}

TEST(CompiledMemory, WithLessOfItGradientsHaveTheSameBits) {
  const Blocks blocks;
  const Tensor x = wave({256, 128}, 1, 0);
  backward(sum(square(blocks(x))));
  const std::vector<Values> expected = blocks.gradients();
  constexpr int64_t kActivation = 256 * 128 * 4;
  // Each block keeps its input, what the activation reads and what it makes, and the result. The activation is made
  // again at once; with less memory so is everything but what leads from block to block.
  for (const auto& [budget, kept] : {std::pair{1.0, 6}, {0.5, 4}, {0.0, 3}}) {
    for (const bool whole : {false, true}) {
      int64_t bytes = 0;
      auto f = compile([&](const Tensor& in) { return blocks(in); },
                       {.whole_graph = whole, .backend = watching(bytes), .memory_budget = budget});
      for (int call = 0; call < 2; ++call) {
        backward(sum(square(f(x))));
        EXPECT_EQ(blocks.gradients(), expected) << budget << whole;
      }
      EXPECT_LE(bytes, kept * kActivation) << budget << whole;
      EXPECT_EQ(explain(f).compiles, 1);
    }
  }
}

// Each piece keeps what its own backward needs.
TEST(CompiledMemory, PiecesOfTheSplitterComputeAgainWhatIsTheirs) {
  const Blocks blocks;
  const Tensor x = wave({256, 128}, 1, 0);
  backward(sum(square(blocks(x))));
  const std::vector<Values> expected = blocks.gradients();
  const graph::ActiveDdp module{.cap = 100'000};
  int64_t before = INT64_MAX;
  for (const double budget : {1.0, 0.0}) {
    int64_t bytes = 0;
    auto f = compile(blocks, {.backend = watching(bytes), .memory_budget = budget});
    for (int call = 0; call < 2; ++call) {
      const auto loss = [&] {
        const graph::ActiveDdpScope active(module);
        return f(x);
      }();
      backward(sum(square(loss)));
      EXPECT_EQ(blocks.gradients(), expected) << budget;
    }
    EXPECT_GT(explain(f).graphs.size(), 1u);
    EXPECT_LT(bytes, before);
    before = bytes;
  }
}

// Between forward and backward a caller may write to what an eager backward would not read. With a smaller budget it
// may be read, and a write is an error, never a wrong gradient.
TEST(CompiledMemory, WhatBackwardDoesNotReadMayBeOverwritten) {
  const Blocks blocks;
  const Tensor x = wave({256, 128}, 1, 0), bias = clone(detach(blocks.bias));
  backward(sum(square(blocks(x))));
  const std::vector<Values> expected = blocks.gradients();
  for (const double budget : {1.0, 0.0}) {
    auto f = compile(blocks, {.memory_budget = budget});
    const Tensor loss = sum(square(f(x)));
    {
      const NoGrad quiet;
      fill_(blocks.bias, 9);
    }
    if (budget == 1) {
      backward(loss);
      EXPECT_EQ(blocks.gradients(), expected);
    } else {
      EXPECT_NE(message_of([&] { backward(loss); }).find("overwritten in place"), std::string::npos);
    }
    const NoGrad quiet;
    copy_(blocks.bias, bias);
  }
}

// A part under checkpoint keeps nothing but what goes in: where one follows another, that is what the first made.
TEST(CompiledMemory, TheBoundaryBetweenTwoCheckpointsIsKept) {
  const Tensor w = set_requires_grad(wave({128, 128}, 0.1, 1)), x = wave({256, 128}, 1, 0);
  const auto part = [&](const std::vector<Tensor>& in) {
    return std::vector{matmul(gelu(matmul(gelu(matmul(in[0], w)), w)), w)};
  };
  const auto body = [&](const Tensor& in) { return checkpoint(part, {checkpoint(part, {in})[0]})[0]; };
  backward(sum(square(body(x))));
  const Values expected = values(gradient(w));
  int64_t bytes = 0;
  size_t products = 0;
  const compiled::Backend backend = [&, watch = watching(bytes)](graph::Graph graph, const compiled::GraphInfo& info) {
    for (const graph::Node& node : graph.nodes) products += info.is_backward && node.name() == "matmul" ? 1 : 0;
    return watch(std::move(graph), info);
  };
  set_gradient(w, {});
  auto f = compile(body, {.backend = backend});
  backward(sum(square(f(x))));
  EXPECT_EQ(values(gradient(w)), expected);
  EXPECT_EQ(bytes, 2 * 256 * 128 * 4) << "the boundary and the result";
  // Two products of each part are made again (nobody needs what the last one makes), and each of three has a gradient
  // of the weight and, but for the first of all, of what goes in.
  EXPECT_EQ(products, 4u + 6 + 5);
}

// What the function itself overwrites is not read again, whatever the budget.
TEST(CompiledMemory, StatesThatTheFunctionWritesAreReadOnce) {
  const Blocks blocks;
  const auto run = [&](bool compiled) {
    const Tensor x = wave({256, 128}, 1, 0), state = zeros({128});
    const auto body = [&](const Tensor& in) {
      Tensor y = in;
      for (int i = 0; i < 3; ++i) {
        const Tensor up = add(add(matmul(y, blocks.up), blocks.bias), state);
        y = add(y, matmul(gelu(up), blocks.down));
      }
      const NoGrad quiet;
      add_(state, 0.5);
      return y;
    };
    std::vector<Values> all;
    auto f = compile(body, {.whole_graph = true, .memory_budget = 0});
    for (int call = 0; call < 3; ++call) {
      backward(sum(square(compiled ? f(x) : body(x))));
      for (Values& gradient : blocks.gradients()) all.push_back(std::move(gradient));
      all.push_back(values(state));
    }
    return all;
  };
  EXPECT_EQ(run(true), run(false));
}

// At other sizes of a graph with symbols the same values are kept, so that nothing is compiled.
TEST(CompiledMemory, OtherSizesKeepTheSameValues) {
  const Blocks blocks;
  int compiled_graphs = 0;
  const compiled::Backend counting = [&](graph::Graph graph, const compiled::GraphInfo& info) {
    ++compiled_graphs;
    return compiled::joint_eager()(std::move(graph), info);
  };
  auto f = compile(blocks, {.backend = counting});
  for (const int64_t rows : {256, 300, 8, 500}) {
    const Tensor x = wave({rows, 128}, 1, 0);
    backward(sum(square(blocks(x))));
    const std::vector<Values> expected = blocks.gradients();
    backward(sum(square(f(x))));
    EXPECT_EQ(blocks.gradients(), expected) << rows;
  }
  EXPECT_EQ(explain(f).compiles, 2);
  EXPECT_EQ(explain(f).resizes, 2);
  EXPECT_EQ(compiled_graphs, 4) << "forward and backward, of two sizes";
}

}  // namespace
}  // namespace chorale
