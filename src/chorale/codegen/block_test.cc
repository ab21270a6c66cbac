#include "chorale/codegen/block.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/codegen/fused.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

// A class that does not exist is the op's own error, and nothing was written.
TEST(Blocks, WhatAnOpRefusesIsItsOwnError) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  const Tensor w = set_requires_grad(uniform({4, 6}));
  auto step = compile(
      [&](const Tensor& x, const Tensor& target) {
        set_gradient(w, {});
        const Tensor loss = cross_entropy(matmul(x, w), target);
        backward(loss);
        const NoGrad quiet;
        sub_(w, mul(gradient(w), 0.5));
        return loss;
      },
      {.whole_graph = true, .backend = fused({.cache = &cache})});
  const Tensor x = uniform({3, 4});
  step(x, Tensor::from<int64_t>({0, 5, -100}, {3}));
  const std::vector<float> before = w.to_vector<float>();
  try {
    step(x, Tensor::from<int64_t>({0, 6, 1}, {3}));
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("target 6 at place 1 of 3 is not one of the 6 classes"));
  }
  EXPECT_EQ(w.to_vector<float>(), before);
}

// What becomes one number, one line, or what it was.
TEST(Blocks, SumsOfAnything) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  const auto f = [](const Tensor& x) -> std::vector<Tensor> {
    const Tensor y = mul(x, 2);
    return {sum(y), sum(y, {0}), sum(y, {0}, true), sum(y, {1}), sum(y, {0, 1}, true)};
  };
  auto compiled = compile(f, {.backend = fused({.cache = &cache, .optimize = "-O1"})});
  for (const Shape& sizes : {Shape{1, 9}, Shape{9, 9}, Shape{9, 1}, Shape{20, 30}, Shape{1, 1}}) {
    const Tensor x = uniform(sizes);
    const std::vector<Tensor> expected = f(x), made = compiled(x);
    for (size_t i = 0; i < made.size(); ++i) {
      EXPECT_EQ(made[i].sizes(), expected[i].sizes()) << sizes << i;
      EXPECT_EQ(made[i].to_vector<float>(), expected[i].to_vector<float>()) << sizes << ", result " << i;
    }
  }
}

constexpr const char* kBefore = R"(graph(%0: f32[8, 20], %1: f32[32, 20], %2: f32[4096, 9]) {
  %3: f32[20, 32]:[1, 20] = permute(%1) {dims=[1, 0]}
  %4: f32[8, 32] = matmul(%0, %3)
  %5: f32[8, 32] = relu(%4)
  %6: f32[32] = sum(%5) {dims=[0], keepdim=false}
  %7: f32[4096, 9] = exp(%2)
  %8: f32[32, 8]:[1, 32] = permute(%5) {dims=[1, 0]}
  %9: f32[32, 20] = matmul(%8, %0)
  return %6, %7, %9, %8
}
)";
// A large value stays outside; the view that is a result shows what the block makes.
TEST(Blocks, AreRunsOfNodesOnSmallTensors) {
  const graph::Graph graph = graph::parse(kBefore);
  graph::Graph joined = make_blocks(graph);
  graph::verify(joined);
  EXPECT_EQ(graph::print(joined), R"(graph(%0: f32[8, 20], %1: f32[32, 20], %2: f32[4096, 9]) {
  %3: f32[8, 32], %4: f32[32] = block(%1, %0) (%0: f32[32, 20], %1: f32[8, 20]) {
    %2: f32[20, 32]:[1, 20] = permute(%0) {dims=[1, 0]}
    %3: f32[8, 32] = matmul(%1, %2)
    %4: f32[8, 32] = relu(%3)
    %5: f32[32] = sum(%4) {dims=[0], keepdim=false}
    return %4, %5
  }
  %5: f32[4096, 9] = exp(%2)
  %6: f32[32, 8]:[1, 32] = permute(%3) {dims=[1, 0]}
  %7: f32[32, 20] = matmul(%6, %0)
  return %4, %5, %7, %6
}
)");
  EXPECT_EQ(graph::print(graph::parse(graph::print(joined))), graph::print(joined));
}

TEST(Blocks, AreReadableC) {
  graph::Graph joined = make_blocks(graph::parse(kBefore));
  EXPECT_EQ(render_block(*joined.nodes[0].body).text,
            R"(INLINE void bf422d2d9d9a5773d_1(char* const* p, const long* a, long begin, long end) {
  const float* x0 = (const float*)p[0];
  float* x1 = (float*)p[1];
  const long first = begin, n = end;
  u8 part[2][64] __attribute__((aligned(64))) = {};
  for (long i = first; i < n; i += LF) {
    const long left = n - i;
    const float* q0 = x0 + i;
    float* q1 = x1 + i;
    if (left < LF) {
      copy(part[0], (const u8*)q0, left * sizeof(float));
      q0 = (float*)part[0];
      q1 = (float*)part[1];
    }
    F v0 = f_load_f32(q0);
    I v1 = v0 < f_splat(0x0p+0f);
    F v2 = f_select(v1, f_splat(0x0p+0f), v0);  // relu
    f_store_f32(q1, v2);
    if (left < LF) {
      copy((u8*)(x1 + i), part[1], left * sizeof(float));
    }
  }
}
long bf422d2d9d9a5773d(char* const* p) {
  const float* v0 = (const float*)p[0];
  const float* v1 = (const float*)p[1];
  float* v4 = (float*)p[2];
  float* v5 = (float*)p[3];
  const float* v2 = v0 + 0;  // permute
  float v3[256] __attribute__((aligned(64)));
  float t0[640] __attribute__((aligned(64)));
  // matmul
  f_transpose(v2, 32, 20, 20, t0);
  f_product(8, 32, 20, v1, 20, 1, t0, 32, v3, 0);
  // relu
  {
    static const long a[] = {256, 1, 1};
    char* const q[] = {(char*)v3, (char*)v4};
    bf422d2d9d9a5773d_1(q, a, 0, 256);
  }
  // sum
  f_column_sums(v4, 8, 32, v5);
  return 0;
}
)");
}

}  // namespace
}  // namespace chorale::codegen
