// Reductions of lines in generated kernels, with what comes before and behind them: the bits of the ops.
#include "chorale/codegen/line_kernels.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/fuse.h"
#include "chorale/codegen/fused.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

using Function = std::vector<Tensor> (*)(const Tensor& x, const Tensor& y, const Tensor& w, const Tensor& b);

std::vector<Tensor> all(const Tensor& x, const Tensor& y, const Tensor& w, const Tensor& b) {
  const IntList last{x.size(-1)};
  const Tensor p = softmax(add(mul(x, 0.125), y)), centered = sub(x, sum(mul(x, y), {-1}, true));
  return {
      mul(p, 3.0),
      add(log_softmax(sub(x, y)), 1.0),
      relu(layer_norm(add(x, y), last, w, b)),
      gelu(layer_norm(mul(x, y), last)),
      add(rms_norm(sub(x, 0.5), last, w), y),
      sum(exp(sub(x, y)), {-1}),
      mul(centered, w),
      where(lt(x, y), log_softmax(x), p),
  };
}

size_t count_lines(const graph::Graph& graph) {
  size_t count = 0;
  for (const graph::Node& node : graph.nodes) {
    for (size_t n = 0; node.body && n < node.body->nodes.size(); ++n)
      count += reduces_lines(*node.body, node.body->nodes[n]) ? 1 : 0;
  }
  return count;
}

// Values and gradients, by bits.
void expect_same(const Shape& sizes, CodeCache& cache) {
  manual_seed(5);
  const int64_t n = sizes.back();
  const Tensor x = normal(sizes), y = normal(sizes), w = uniform({n}), b = uniform({n});
  const auto outcome = [&](const auto& f) {
    std::vector<Tensor> in;
    for (const Tensor& one : {x, y, w, b}) in.push_back(set_requires_grad(clone(one)));
    std::vector<Tensor> made = f(in[0], in[1], in[2], in[3]);
    Tensor loss = sum(made[0]);
    for (size_t i = 1; i < made.size(); ++i) loss = add(loss, sum(square(made[i])));
    backward(loss);
    for (const Tensor& one : in) made.push_back(gradient(one));
    return made;
  };
  size_t reductions = 0;
  const auto backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
    auto program = fuse_and_compile(std::move(graph), {.cache = &cache, .optimize = "-O1", .blocks = false});
    reductions += count_lines(program->graph());
    return program;
  };
  const std::vector<Tensor> expected = outcome(all), made = outcome(compile(all, {.backend = backend}));
  for (size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].to_vector<float>(), expected[i].to_vector<float>()) << sizes << ", result " << i;
  }
  EXPECT_GE(reductions, 7u) << sizes;
}

// The bits are the same at all sizes and with any number of threads. Kernels are functions of sizes: nothing is
// compiled for the second (of large values other nodes are joined, those that read the same one).
TEST(Lines, HaveTheBitsOfTheOps) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  expect_same({7, 129}, cache);
  const int64_t compiled = cache.counts().miss;
  expect_same({2, 1000}, cache);
  EXPECT_EQ(cache.counts().miss, compiled);
  expect_same({16, 16}, cache);
  const int before = thread_count();
  set_thread_count(3);
  expect_same({700, 300}, cache);
  set_thread_count(before);
}

TEST(Lines, TakeAlongWhatComesBeforeAndBehind) {
  graph::Graph fused = fuse(graph::parse(R"(graph(%0: f32[4, 6, 32], %1: f32[32], %2: f32[4, 1, 32]) {
  %3: f32[4, 6, 32] = mul(%0, %1)
  %4: f32[4, 6, 32] = softmax(%3) {dim=-1}
  %5: f32[4, 6, 32] = add(%4, %2)
  %6: f32[4, 6, 32] = relu(%4)
  return %5, %6
}
)"));
  graph::renumber(fused);
  graph::verify(fused);
  // %2 is another one for some lines and the same for others: its sum stays outside.
  EXPECT_EQ(graph::print(fused), R"(graph(%0: f32[4, 6, 32], %1: f32[32], %2: f32[4, 1, 32]) {
  %3: f32[4, 6, 32], %4: f32[4, 6, 32] = fused(%0, %1) (%0: f32[4, 6, 32], %1: f32[32]) {
    %2: f32[4, 6, 32] = mul(%0, %1)
    %3: f32[4, 6, 32] = softmax(%2) {dim=-1}
    %4: f32[4, 6, 32] = relu(%3)
    return %3, %4
  }
  %5: f32[4, 6, 32] = add(%3, %2)
  return %5, %4
}
)");
}

TEST(Lines, AreReadableC) {
  const graph::Graph fused = fuse(graph::parse(R"(graph(%0: f32[6, 32], %1: f32[6, 1]) {
  %2: f32[6, 32] = mul(%0, %1)
  %3: f32[6, 32] = softmax(%2) {dim=-1}
  return %3
}
)"));
  ASSERT_EQ(fused.nodes.size(), 1u);
  // In front of it stands the multiplication of one line, as of any elementwise kernel.
  const std::string text = render_lines(*fused.nodes[0].body).text;
  EXPECT_EQ(text.substr(text.find("void r001c3fdf1a2c2aad(")),
            R"(void r001c3fdf1a2c2aad(char* const* p, const long* a, long begin, long end) {
  const long n = a[0];
  float v2[n];
  for (long line = begin; line < end; ++line) {
    const float* v0 = (const float*)p[0] + line * n;
    const float* v1 = (const float*)p[1] + line;
    float* v3 = (float*)p[2] + line * n;
    // mul
    {
      char* const q[] = {(char*)v0, (char*)v1, (char*)v2};
      r001c3fdf1a2c2aad_0(q, a, 0, n);
    }
    // softmax
    f_line_softmax(v2, v3, n);
  }
}
)");
}

}  // namespace
}  // namespace chorale::codegen
