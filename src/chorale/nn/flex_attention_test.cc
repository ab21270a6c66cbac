#include "chorale/nn/flex_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"

namespace chorale {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

void expect_near(const Tensor& a, const Tensor& b, double tolerance) {
  ASSERT_EQ(a.sizes(), b.sizes());
  const auto x = to(a, DType::kF64).to_vector<double>(), y = to(b, DType::kF64).to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], tolerance * (1 + std::abs(y[i]))) << i;
}

struct Inputs {
  Tensor q, k, v;
  Inputs(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t features, int64_t kv_heads = 0) {
    const int64_t of_keys = kv_heads == 0 ? heads : kv_heads;
    q = set_requires_grad(normal({batch, heads, queries, features}, 0, 1, DType::kF64));
    k = set_requires_grad(normal({batch, of_keys, keys, features}, 0, 1, DType::kF64));
    v = set_requires_grad(normal({batch, of_keys, keys, features + 1}, 0, 1, DType::kF64));
  }
  std::vector<Tensor> gradients_of(const Tensor& y, const std::vector<Tensor>& also = {}) const {
    std::vector<Tensor> all{q, k, v};
    all.insert(all.end(), also.begin(), also.end());
    for (const Tensor& x : all) set_gradient(x, {});
    backward(sum(y * y));
    std::vector<Tensor> made;
    made.reserve(all.size());
    for (const Tensor& x : all) made.push_back(gradient(x));
    return made;
  }
};

Tensor causal(const FlexPlace& at) { return ge(at.q, at.kv); }

// What attention is, with a bias that is added to the scores and a mask, everything at once.
Tensor dense(const Inputs& in, const Tensor& bias, const Tensor& mask) {
  Tensor score = matmul(in.q, transpose(in.k, 2, 3)) * (1 / std::sqrt(static_cast<double>(in.q.size(3))));
  if (bias.defined()) score = score + bias;
  if (mask.defined()) score = where(mask, score, -std::numeric_limits<double>::infinity());
  return matmul(softmax(score, 3), in.v);
}

TEST(FlexAttention, WithoutFunctionsIsAttention) {
  const Inputs in(2, 3, 7, 9, 4);
  expect_near(flex_attention(in.q, in.k, in.v), dense(in, {}, {}), 1e-12);
  expect_near(flex_attention(in.q, in.k, in.v, {.scale = 0.0}), expand(mean(in.v, {2}, true), {2, 3, 7, 5}), 1e-12);
}

// ALiBi with slopes that are learnt: a captured tensor has a gradient.
TEST(FlexAttention, AScoreFunctionMayCaptureWhatIsLearnt) {
  const Inputs in(2, 3, 8, 8, 4);
  const Tensor slopes = set_requires_grad(Tensor::from<double>({-0.5, -1, -2}, {3}));
  const auto alibi = [&](const Tensor& score, const FlexPlace& at) {
    return score + sub(at.q, at.kv) * reshape(index_select(slopes, 0, flatten(at.head)), {1, 3, 1, 1});
  };
  const Tensor places = arange(8, DType::kF64);
  const Tensor bias = sub(reshape(places, {1, 1, 8, 1}), reshape(places, {1, 1, 1, 8})) * reshape(slopes, {1, 3, 1, 1});
  const Tensor y = flex_attention(in.q, in.k, in.v, {.score = alibi}), expected = dense(in, bias, {});
  expect_near(y, expected, 1e-12);
  const std::vector<Tensor> made = in.gradients_of(y, {slopes}), wanted = in.gradients_of(expected, {slopes});
  for (size_t i = 0; i < made.size(); ++i) expect_near(made[i], wanted[i], 1e-10);
}

TEST(FlexAttention, ABlockMaskSaysWhichTilesAreNeeded) {
  const BlockMask mask = block_mask(causal, 1, 1, 10, 10, 4);
  EXPECT_THAT(mask.partial, ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
  EXPECT_THAT(mask.full, ElementsAre(IsEmpty(), ElementsAre(0), ElementsAre(0, 1)));
  EXPECT_THAT(mask.full_by_column(), ElementsAre(ElementsAre(1, 2), ElementsAre(2), IsEmpty()));
  EXPECT_THAT(mask.partial_by_column(), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
  // Heads have masks of their own: the second sees everything.
  const BlockMask by_head =
      block_mask([](const FlexPlace& at) { return logical_or(ge(at.q, at.kv), eq(at.head, 1)); }, 1, 2, 8, 8, 4);
  EXPECT_THAT(by_head.full, ElementsAre(IsEmpty(), ElementsAre(0), ElementsAre(0, 1), ElementsAre(0, 1)));
}

// Tiles that do not divide the lengths, a window with tiles that are never computed, and a mask that differs by head.
TEST(FlexAttention, TilesGiveWhatTheWholeGives) {
  const Inputs in(2, 2, 21, 21, 4);
  const std::vector<FlexMask> masks = {
      causal,
      [](const FlexPlace& at) { return lt(abs(sub(at.q, at.kv)), 3); },
      [](const FlexPlace& at) { return logical_or(ge(at.q, at.kv), eq(at.head, 1)); },
      [](const FlexPlace& at) { return eq(remainder(at.kv, 5), remainder(at.q, 5)); },
  };
  const FlexPlace all{reshape(arange(2, DType::kI64), {2, 1, 1, 1}), reshape(arange(2, DType::kI64), {1, 2, 1, 1}),
                      reshape(arange(21, DType::kI64), {1, 1, 21, 1}), reshape(arange(21, DType::kI64), {1, 1, 1, 21})};
  for (size_t i = 0; i < masks.size(); ++i) {
    int asked = 0;
    const BlockMask mask = block_mask(
        [&](const FlexPlace& at) {
          ++asked;
          return masks[i](at);
        },
        1, 2, 21, 21, 4);
    asked = 0;
    const Tensor y = flex_attention(in.q, in.k, in.v, {.mask = &mask}), expected = dense(in, {}, masks[i](all));
    expect_near(y, expected, 1e-12);
    EXPECT_GT(asked, 0);
    if (i < 2) {
      EXPECT_LE(asked, 12) << "the mask is asked where tiles are full";
    }
    const std::vector<Tensor> made = in.gradients_of(y), wanted = in.gradients_of(expected);
    for (size_t g = 0; g < made.size(); ++g) expect_near(made[g], wanted[g], 1e-10);
  }
}

TEST(FlexAttention, AQueryThatSeesNothingGivesZeros) {
  const Inputs in(1, 1, 6, 6, 2);
  const BlockMask mask =
      block_mask([](const FlexPlace& at) { return logical_and(ge(at.q, 3), ge(at.kv, at.q)); }, 1, 1, 6, 6, 2);
  const FlexResult y = flex_attention_with_lse(in.q, in.k, in.v, {.mask = &mask});
  for (const double x : slice(y.output, 2, 0, 3).to_vector<double>()) EXPECT_EQ(x, 0);
  for (const double x : slice(y.log_sum_exp, 2, 0, 3).to_vector<double>()) EXPECT_EQ(x, -INFINITY);
  expect_near(select(y.output, 2, 5), select(in.v, 2, 5), 1e-12);
  for (const Tensor& gradient : in.gradients_of(y.output)) {
    for (const double x : gradient.to_vector<double>()) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST(FlexAttention, HeadsOfQueriesMayShareKeys) {
  const Inputs in(2, 4, 5, 6, 3, 2);
  const Tensor y = flex_attention(in.q, in.k, in.v, {.grouped_query = true});
  const Inputs wide = [&] {
    Inputs other = in;
    other.k = repeat_interleave(in.k, 2, 1);
    other.v = repeat_interleave(in.v, 2, 1);
    return other;
  }();
  expect_near(y, dense(wide, {}, {}), 1e-12);
}

TEST(FlexAttention, WhatDoesNotFitIsRefused) {
  const Inputs in(1, 2, 8, 8, 4);
  EXPECT_THROW(flex_attention(select(in.q, 0, 0), in.k, in.v), InvalidArgument);
  EXPECT_THROW(flex_attention(slice(in.q, 1, 0, 1), in.k, in.v), InvalidArgument);
  const BlockMask is_short = block_mask(causal, 1, 1, 4, 8, 4), other_heads = block_mask(causal, 1, 3, 8, 8, 4);
  EXPECT_THROW(flex_attention(in.q, in.k, in.v, {.mask = &is_short}), InvalidArgument);
  EXPECT_THROW(flex_attention(in.q, in.k, in.v, {.mask = &other_heads}), InvalidArgument);
  EXPECT_THROW(block_mask(causal, 1, 1, 0, 8), InvalidArgument);
}

// One graph, whose scalar functions are nodes like others.
TEST(FlexAttention, IsPartOfCompiledFunctions) {
  const Inputs in(2, 2, 12, 12, 4);
  const BlockMask mask = block_mask(causal, 1, 1, 12, 12, 4);
  const auto attend = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    return flex_attention(
        q, k, v,
        {.score = [](const Tensor& score, const FlexPlace& at) { return score + tanh(at.kv * 0.1); }, .mask = &mask});
  };
  auto compiled = compile(attend, {.whole_graph = true});
  for (int call = 0; call < 2; ++call) {
    const Tensor y = compiled(in.q, in.k, in.v), expected = attend(in.q, in.k, in.v);
    expect_near(y, expected, 1e-12);
    const std::vector<Tensor> made = in.gradients_of(y), wanted = in.gradients_of(expected);
    for (size_t i = 0; i < made.size(); ++i) expect_near(made[i], wanted[i], 1e-10);
  }
  EXPECT_EQ(explain(compiled).compiles, 1);
}

}  // namespace
}  // namespace chorale
