// Fused kernels against the ops one by one: the same bits, for every word of the vocabulary.
#include "chorale/codegen/fused.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/fuse.h"
#include "chorale/codegen/render.h"
#include "chorale/graph/split.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

// Numbers of all sizes and signs, with the special ones among them.
Tensor numbers(const Shape& sizes, DType dtype, int seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float special[] = {0.0f,   -0.0f,   kInf,   -kInf, std::numeric_limits<float>::quiet_NaN(),
                               1e-40f, -3e-39f, 1.0f,   -1.0f, 0.5f,
                               88.9f,  -103.5f, 1e-20f, 3e38f};
  std::vector<float> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) {
    const double at = static_cast<double>(i) * 0.7311 + seed * 1.37;
    values[i] = i % 11 == 3 ? special[(i / 11 + static_cast<size_t>(seed)) % std::size(special)]
                            : static_cast<float>(std::sin(at) * std::exp2(std::fmod(at, 9.0) - 4));
  }
  return to(Tensor::from(values, sizes), dtype);
}

::testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes() || a.strides() != b.strides()) {
    return ::testing::AssertionFailure() << "other kinds of tensors";
  }
  const Tensor x = contiguous(a), y = contiguous(b);
  const size_t size = size_of(x.dtype());
  const std::vector<double> xs = to(x, DType::kF64).to_vector<double>(), ys = to(y, DType::kF64).to_vector<double>();
  for (size_t i = 0; i < xs.size(); ++i) {
    const auto* p = static_cast<const char*>(x.raw()) + i * size;
    const auto* q = static_cast<const char*>(y.raw()) + i * size;
    if (std::memcmp(p, q, size) == 0 || (std::isnan(xs[i]) && std::isnan(ys[i]))) continue;
    return ::testing::AssertionFailure() << "element " << i << ": " << xs[i] << " and " << ys[i];
  }
  return ::testing::AssertionSuccess();
}

// Each result is made by several ops in a row.
std::vector<Tensor> arithmetic(const Tensor& x, const Tensor& y) {
  const Tensor mask = logical_and(lt(x, y), logical_not(eq(x, 0.5)));
  return {
      mul(add(x, y), sub(x, y)),
      div(mul(x, 3.25), add(abs(y), 0.5)),
      sub(neg(square(x)), y, 0.75),
      maximum(minimum(x, y), clamp(x, -0.25, 0.75)),
      sqrt(abs(mul(x, y))),
      floor(mul(x, 4)),
      ceil(mul(x, 4)),
      round(mul(x, 4)),
      trunc(mul(x, 4)),
      sign(sub(x, y)),
      relu(sub(x, y)),
      leaky_relu(sub(x, y), 0.125),
      where(mask, mul(x, 2), add(y, 1)),
      masked_fill(mul(x, y), mask, -1.5),
      logical_or(isnan(mul(x, 1)), ge(x, y)),
      isfinite(mul(x, y)),
      addcmul(x, y, mul(x, 2), 0.5),
      lerp(x, y, 0.375),
      mul(x, mask),
  };
}
std::vector<Tensor> elementary(const Tensor& x, const Tensor& y) {
  return {
      exp(mul(x, 2)),      exp2(add(x, y)),       expm1(neg(x)),      log(mul(abs(x), 0.5)), log1p(mul(x, 0.5)),
      tanh(add(x, y)),     erf(mul(x, 0.5)),      sigmoid(sub(x, y)), silu(mul(x, 0.75)),    gelu(add(x, 0.25)),
      softplus(mul(x, 3)), elu(mul(x, 1.5), 0.5), gelu(mul(x, 0.5)),
  };
}

using Results = std::vector<Tensor> (*)(const Tensor& x, const Tensor& y);

size_t fused_nodes(const std::string& text) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find("fused(", at)) != std::string::npos; ++at) ++count;
  return count;
}

// Runs f over several pairs in one graph, compiled and not.
void expect_same(Results f, const std::vector<Tensor>& xs, const std::vector<Tensor>& ys) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  const auto all = [&](const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
    std::vector<Tensor> results;
    for (size_t i = 0; i < a.size(); ++i) {
      for (const Tensor& y : f(a[i], b[i])) results.push_back(y);
    }
    return results;
  };
  const std::vector<Tensor> expected = all(xs, ys);
  size_t fused = 0;
  auto compiled = compile(all, {.backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
                            auto program = fuse_and_compile(std::move(graph), {.cache = &cache});
                            fused = fused_nodes(graph::print(program->graph()));
                            return program;
                          }});
  for (int call = 0; call < 2; ++call) {
    const std::vector<Tensor> made = compiled(xs, ys);
    for (size_t i = 0; i < made.size(); ++i) {
      EXPECT_TRUE(same_bits(made[i], expected[i])) << "pair " << i * xs.size() / made.size() << ", result " << i;
    }
  }
  EXPECT_GE(fused, xs.size());
  EXPECT_EQ(cache.counts().miss, 1);
}

class FusedDtypes : public testing::TestWithParam<DType> {};

TEST_P(FusedDtypes, HaveTheBitsOfTheOps) {
  const DType dtype = GetParam();
  const std::vector<Tensor> xs{numbers({1003}, dtype, 1),
                               numbers({37, 5}, dtype, 1),
                               numbers({6, 1, 35}, dtype, 1),
                               numbers({9, 20}, dtype, 1),
                               t(numbers({9, 20}, dtype, 1)),
                               numbers({}, dtype, 3),
                               narrow(numbers({8, 50}, dtype, 3), 1, 3, 41)};
  const std::vector<Tensor> ys{numbers({1003}, dtype, 2),     numbers({5}, dtype, 2),
                               numbers({6, 4, 1}, dtype, 2),  t(numbers({20, 9}, dtype, 2)),
                               t(numbers({9, 20}, dtype, 2)), numbers({}, dtype, 7),
                               numbers({8, 41}, dtype, 7)};
  expect_same(arithmetic, xs, ys);
  if (dtype != DType::kF64) expect_same(elementary, xs, ys);  // of f64 they are SLEEF's, and stay ops
}
INSTANTIATE_TEST_SUITE_P(Dtypes, FusedDtypes, testing::Values(DType::kF32, DType::kBF16, DType::kF64),
                         [](const auto& row) { return std::string(name_of(row.param)); });

TEST(Fused, DoesNotDependOnTheNumberOfThreads) {
  const int before = thread_count();
  for (const int threads : {1, 3}) {
    set_thread_count(threads);
    expect_same([](const Tensor& x, const Tensor& y) -> std::vector<Tensor> { return {relu(mul(add(x, y), 0.5))}; },
                {numbers({200'003}, DType::kF32, 1), numbers({700, 301}, DType::kF32, 1)},
                {numbers({200'003}, DType::kF32, 2), numbers({301}, DType::kF32, 2)});
  }
  set_thread_count(before);
}

TEST(Fused, GradientsToo) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  const Tensor w = set_requires_grad(numbers({6, 8}, DType::kF32, 5)), x = full({3, 6}, 0.25);
  const auto f = [&](const Tensor& in) { return tanh(gelu(mul(matmul(in, w), 0.5))); };
  backward(sum(f(x)));
  const Tensor expected = gradient(w);
  set_gradient(w, {});
  backward(sum(compile(f, {.backend = fused({.cache = &cache})})(x)));
  EXPECT_TRUE(same_bits(gradient(w), expected));
}

// What comes back to a group after it has left it cannot be part of the same kernel.
TEST(Fuse, LeavesNoCircle) {
  const graph::Graph graph = graph::parse(R"(graph(%0: f32[4, 4]) {
  %1: f32[4, 4] = relu(%0)
  %2: f32[4, 4] = neg(%1)
  %3: f32[4, 4] = matmul(%2, %0)
  %4: f32[4, 4] = mul(%3, %1)
  %5: f32[4, 4] = add(%4, %2)
  return %5
}
)");
  graph::Graph fused = fuse(graph);
  graph::renumber(fused);
  graph::verify(fused);
  EXPECT_EQ(graph::print(fused), R"(graph(%0: f32[4, 4]) {
  %1: f32[4, 4], %2: f32[4, 4] = fused(%0) (%0: f32[4, 4]) {
    %1: f32[4, 4] = relu(%0)
    %2: f32[4, 4] = neg(%1)
    return %2, %1
  }
  %3: f32[4, 4] = matmul(%1, %0)
  %4: f32[4, 4] = fused(%3, %2, %1) (%0: f32[4, 4], %1: f32[4, 4], %2: f32[4, 4]) {
    %3: f32[4, 4] = mul(%0, %1)
    %4: f32[4, 4] = add(%3, %2)
    return %4
  }
  return %4
}
)");
}

TEST(Render, GivesReadableC) {
  const graph::Graph graph = graph::parse(R"(graph(%0: f32[8, 3], %1: f32[3]) {
  %2: f32[8, 3] = add(%0, %1)
  %3: f32[8, 3] = relu(%2)
  return %3
}
)");
  EXPECT_EQ(kernels_of(fuse(graph)).at(0).text,
            R"(void kd8ce7252e6d86972(char* const* p, const long* a, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const float* x0 = (const float*)p[0];
    const float* x1 = (const float*)p[1];
    float* x2 = (float*)p[2];
    long rest = row, at;
    at = rest;
    x0 += at * a[2];
    x2 += at * a[6];
    const long first = 0, n = a[1];
    u8 part[3][64] __attribute__((aligned(64))) = {};
    for (long i = first; i < n; i += LF) {
      const long left = n - i;
      const float* q0 = x0 + i;
      const float* q1 = x1 + i;
      float* q2 = x2 + i;
      if (left < LF) {
        copy(part[0], (const u8*)q0, left * sizeof(float));
        q0 = (float*)part[0];
        copy(part[1], (const u8*)q1, left * sizeof(float));
        q1 = (float*)part[1];
        q2 = (float*)part[2];
      }
      F v0 = f_load_f32(q0);
      F v1 = f_load_f32(q1);
      F v2 = v0 + v1;  // add
      I v3 = v2 < f_splat(0x0p+0f);
      F v4 = f_select(v3, f_splat(0x0p+0f), v2);  // relu
      f_store_f32(q2, v4);
      if (left < LF) {
        copy((u8*)(x2 + i), part[2], left * sizeof(float));
      }
    }
  }
}
)");
}

// Layouts across pieces follow the sizes, so a marked dimension is compiled once, and so is the C code.
// spec: test_ddp_optimizer_inductor_strides_dont_specialize
TEST(FusedAtOtherSizes, NothingIsCompiledAgain) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  const auto weight = [](float scale) { return set_requires_grad(mul(uniform({768, 768}, -1, 1), scale)); };
  const Tensor w0 = weight(0.03f), w1 = weight(0.05f), b0 = uniform({768}), b1 = uniform({768});
  const auto model = [&](const Tensor& x) { return relu(linear(add(relu(linear(x, w0, b0)), 1), w1, b1)); };
  for (const bool whole : {false, true}) {
    auto f = compile(model, {.whole_graph = whole, .dynamic_dims = {{0, 1}}, .backend = fused({.cache = &cache})});
    EXPECT_EQ(explain(f).compiles, 0);
    const graph::ActiveDdp module;
    const graph::ActiveDdpScope active(module);
    CacheCounts before{};
    for (const int64_t length : {18, 20, 33}) {
      const Tensor x = uniform({16, length, 768});
      EXPECT_TRUE(same_bits(f(x), model(x))) << length;
      EXPECT_EQ(explain(f).compiles, 1) << length;
      if (length == 18) before = cache.counts();
      EXPECT_EQ(cache.counts().miss, before.miss) << length;
    }
    ASSERT_EQ(explain(f).graphs.size(), 2u);
    EXPECT_EQ(explain(f).resizes, 2);
    EXPECT_NE(explain(f).graphs[1].text.find("f32[16, s0, 768]"), std::string::npos) << explain(f).graphs[1].text;
  }
}

}  // namespace
}  // namespace chorale::codegen
