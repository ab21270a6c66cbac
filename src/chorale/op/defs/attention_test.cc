#include <limits>

#include "chorale/base/parallel_for.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"

namespace chorale {
namespace {

using testing::HasSubstr;

struct Expected {
  Tensor out, dq, dk, dv;
};

// A contiguous [B, H, rows, columns] as plain numbers.
struct Numbers {
  std::vector<double> values;
  int64_t H, rows, columns;

  explicit Numbers(const Tensor& x)
      : values(x.to_vector<double>()), H(x.size(1)), rows(x.size(2)), columns(x.size(3)) {}
  double& operator()(int64_t b, int64_t h, int64_t i, int64_t c) {
    return values[static_cast<size_t>(((b * H + h) * rows + i) * columns + c)];
  }
};

// Attention and its gradients for [B, H, T, D], weight by weight, in f64. `factor(b, h, i, j)` multiplies a weight
// (dropout), `bias(b, h, i, j)` is added to its score.
using Factor = std::function<double(int64_t, int64_t, int64_t, int64_t)>;
Expected naive_attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, double scale, const Factor& bias,
                         const Factor& factor, const Tensor& dout_in) {
  const int64_t B = q_in.size(0), H = q_in.size(1), T = q_in.size(2), D = q_in.size(3), S = k_in.size(2),
                E = v_in.size(3);
  const int64_t group = H / k_in.size(1);
  const auto zeros_of = [](const Shape& sizes) { return Numbers(zeros(sizes, DType::kF64)); };
  Numbers q(q_in), k(k_in), v(v_in), dout(dout_in), out = zeros_of({B, H, T, E});
  Numbers dq = zeros_of(q_in.sizes()), dk = zeros_of(k_in.sizes()), dv = zeros_of(v_in.sizes());
  for (int64_t head = 0; head < B * H; ++head) {
    const int64_t b = head / H, h = head % H, g = h / group;
    for (int64_t i = 0; i < T; ++i) {
      std::vector<double> p(static_cast<size_t>(S)), f(p.size()), dp(p.size());
      double largest = -std::numeric_limits<double>::infinity(), total = 0, mean = 0;
      for (int64_t j = 0; j < S; ++j) {
        double& score = p[static_cast<size_t>(j)] = bias(b, h, i, j);
        for (int64_t c = 0; c < D; ++c) score += scale * q(b, h, i, c) * k(b, g, j, c);
        largest = std::max(largest, score);
      }
      if (std::isinf(largest)) continue;
      for (double& w : p) total += w = std::exp(w - largest);
      for (int64_t j = 0; j < S; ++j) {
        const auto at = static_cast<size_t>(j);
        p[at] /= total;
        f[at] = factor(b, h, i, j);
        for (int64_t c = 0; c < E; ++c) {
          out(b, h, i, c) += p[at] * f[at] * v(b, g, j, c);
          dv(b, g, j, c) += p[at] * f[at] * dout(b, h, i, c);
          dp[at] += f[at] * dout(b, h, i, c) * v(b, g, j, c);
        }
        mean += p[at] * dp[at];
      }
      for (int64_t j = 0; j < S; ++j) {
        const double ds = scale * p[static_cast<size_t>(j)] * (dp[static_cast<size_t>(j)] - mean);
        for (int64_t c = 0; c < D; ++c) {
          dq(b, h, i, c) += ds * k(b, g, j, c);
          dk(b, g, j, c) += ds * q(b, h, i, c);
        }
      }
    }
  }
  return {Tensor::from(out.values, {B, H, T, E}), Tensor::from(dq.values, q_in.sizes()),
          Tensor::from(dk.values, k_in.sizes()), Tensor::from(dv.values, v_in.sizes())};
}

const Factor kNoBias = [](int64_t, int64_t, int64_t, int64_t) { return 0.0; };
const Factor kNoDropout = [](int64_t, int64_t, int64_t, int64_t) { return 1.0; };
const Factor kCausal = [](int64_t, int64_t, int64_t i, int64_t j) {
  return j <= i ? 0.0 : -std::numeric_limits<double>::infinity();
};

// Forward and backward through the rows, in any dtype.
void expect_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                      const kernel::AttentionAttrs& attrs, const Factor& bias, const Factor& factor, double tolerance,
                      const Tensor& stretch = {}) {
  const auto [out, lse] = op::call_many<2>(op::kAttention, attrs, q, k, v, mask, stretch);
  const Tensor dout = as(op::sample(out.sizes(), 99), q.dtype());
  const auto [dq, dk, dv] =
      op::call_many<3>(op::kAttentionBackward, attrs, dout, Tensor(), q, k, v, mask, out, lse, stretch);
  const Expected e = naive_attention(as(q, DType::kF64), as(k, DType::kF64), as(v, DType::kF64), attrs.scale, bias,
                                     factor, as(dout, DType::kF64));
  expect_near(out, e.out, tolerance, "out");
  expect_near(dq, e.dq, tolerance, "dq");
  expect_near(dk, e.dk, tolerance, "dk");
  expect_near(dv, e.dv, tolerance, "dv");
}

TEST(Attention, AgreesWithItsDefinitionAcrossBlocks) {
  struct Case {
    int64_t T, S, D, E;
  };
  for (const Case& c : {Case{1, 1, 1, 1}, Case{5, 70, 8, 16}, Case{150, 3, 17, 5}, Case{131, 140, 16, 32}}) {
    const Tensor q = op::sample({1, 2, c.T, c.D}, 1), k = op::sample({1, 2, c.S, c.D}, 2),
                 v = op::sample({1, 2, c.S, c.E}, 3);
    for (bool causal : {false, true}) {
      const kernel::AttentionAttrs attrs{.scale = 0.3, .causal = causal};
      const Factor& bias = causal ? kCausal : kNoBias;
      for (auto [dtype, tolerance] : {std::pair{DType::kF64, 1e-11}, {DType::kF32, 1e-4}}) {
        expect_attention(as(q, dtype), as(k, dtype), as(v, dtype), {}, attrs, bias, kNoDropout, tolerance);
      }
    }
  }
}

TEST(Attention, ComputesHalfTypesInF32) {
  const Tensor q = op::sample({1, 2, 20, 8}, 1), k = op::sample({1, 2, 70, 8}, 2), v = op::sample({1, 2, 70, 8}, 3);
  for (auto [dtype, tolerance] : {std::pair{DType::kF16, 4e-3}, {DType::kBF16, 3e-2}}) {
    expect_attention(as(q, dtype), as(k, dtype), as(v, dtype), {}, {.scale = 0.3}, kNoBias, kNoDropout, tolerance);
  }
}

TEST(Attention, SharesKeysAndValuesAmongGroupsOfHeads) {
  const Tensor q = op::sample({2, 6, 9, 4}, 1), k = op::sample({2, 2, 11, 4}, 2), v = op::sample({2, 2, 11, 4}, 3);
  expect_attention(q, k, v, {}, {.scale = 0.5, .grouped = true}, kNoBias, kNoDropout, 1e-11);
  EXPECT_EQ(scaled_dot_product_attention(q, k, v, {.enable_gqa = true}).sizes(), (Shape{2, 6, 9, 4}));
}

TEST(Attention, TakesBoolAndAdditiveMasksOfAnyBroadcastShape) {
  const Tensor q = op::sample({2, 2, 9, 4}, 1), k = op::sample({2, 2, 80, 4}, 2), v = op::sample({2, 2, 80, 4}, 3);
  const double none = -std::numeric_limits<double>::infinity();
  for (const Shape& sizes : {Shape{80}, Shape{9, 80}, Shape{2, 1, 1, 80}, Shape{2, 9, 1}, Shape{2, 2, 9, 80}}) {
    const Tensor allowed = op::sample_bools(sizes, 4), added = op::sample(sizes, 5);
    const auto at_broadcast = [&](const Tensor& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
      const int64_t full[] = {b, h, i, j};
      Shape index;
      for (size_t d = 0; d < sizes.size(); ++d) index.push_back(sizes[d] == 1 ? 0 : full[4 - sizes.size() + d]);
      return at(mask, index);
    };
    const kernel::AttentionAttrs attrs{.scale = 0.4};
    expect_attention(
        q, k, v, allowed, attrs, [&](auto... p) { return at_broadcast(allowed, p...) != 0 ? 0 : none; }, kNoDropout,
        1e-11);
    expect_attention(
        q, k, v, added, attrs, [&](auto... p) { return at_broadcast(added, p...); }, kNoDropout, 1e-11);
  }
}

TEST(Attention, AQueryThatSeesNoKeyGetsZero) {
  const Tensor q = op::sample({1, 1, 2, 3}), k = op::sample({1, 1, 2, 3}, 1), v = op::sample({1, 1, 2, 3}, 2);
  const Tensor mask = Tensor::from<bool>({false, false, true, false}, {2, 2});
  const Tensor out = scaled_dot_product_attention(q, k, v, {.mask = mask});
  for (int64_t c = 0; c < 3; ++c) {
    EXPECT_EQ(at(out, {0, 0, 0, c}), 0);
    EXPECT_EQ(at(out, {0, 0, 1, c}), at(v, {0, 0, 0, c}));
  }
  expect_attention(
      q, k, v, mask, {.scale = 1},
      [&](int64_t, int64_t, int64_t i, int64_t j) {
        return at(mask, {i, j}) != 0 ? 0 : -std::numeric_limits<double>::infinity();
      },
      kNoDropout, 1e-12);
}

TEST(Attention, DropsTheWeightsThatDropoutWould) {
  const Tensor q = op::sample({1, 2, 70, 4}, 1), k = op::sample({1, 2, 67, 4}, 2), v = op::sample({1, 2, 67, 4}, 3);
  const kernel::AttentionAttrs attrs{.scale = 0.5, .dropout_p = 0.4};
  const Tensor stretch = op::sample_stretch(11, 5);
  const Tensor factors = op::call(op::kDropout, kernel::DropoutAttrs{0.4}, ones({1, 2, 70, 67}, DType::kF64), stretch);
  expect_attention(
      q, k, v, {}, attrs, kNoBias, [&](auto... p) { return at(factors, {p...}); }, 1e-11, stretch);
  Generator generator(3), same(3);
  const AttentionOptions options{.dropout_p = 0.4, .generator = &generator};
  expect_equal(scaled_dot_product_attention(q, k, v, options),
               scaled_dot_product_attention(q, k, v, {.dropout_p = 0.4, .generator = &same}));
  EXPECT_EQ(generator.state().offset, static_cast<uint64_t>(2 * 70 * 67 / 4));
}

TEST(Attention, AShardOfHeadsDropsWhatTheWholeWouldDropThere) {
  const Tensor q = op::sample({2, 4, 5, 3}, 1), k = op::sample({2, 4, 6, 3}, 2), v = op::sample({2, 4, 6, 3}, 3);
  const kernel::AttentionAttrs attrs{.scale = 0.5, .dropout_p = 0.4};
  const Tensor whole = op::call_many<2>(op::kAttention, attrs, q, k, v, Tensor(), op::sample_stretch(3, 8))[0];
  for (int64_t head : {0, 1, 3}) {
    const auto part = [&](const Tensor& x) { return narrow(x, 1, head, 1); };
    const Tensor place = Tensor::from<int64_t>({3, 8, 0, 2, head, 4, 0, 5, 0, 6}, {10});
    expect_near(op::call_many<2>(op::kAttention, attrs, part(q), part(k), part(v), Tensor(), place)[0], part(whole), 0);
  }
}

TEST(Attention, ReadsViewsOfAFusedProjectionAndAnswersInTheirOrder) {
  const int64_t B = 2, T = 9, H = 3, D = 16;
  const Tensor qkv = op::sample({B, T, 3, H, D});
  const auto part = [&](int64_t i) { return permute(select(qkv, 2, i), {0, 2, 1, 3}); };
  const Tensor q = part(0), k = part(1), v = part(2);
  const Tensor out = scaled_dot_product_attention(q, k, v);
  expect_near(out, scaled_dot_product_attention(contiguous(q), contiguous(k), contiguous(v)), 0);
  EXPECT_TRUE(transpose(out, 1, 2).is_contiguous());
  // The last dimension need not be contiguous either.
  expect_near(scaled_dot_product_attention(transpose(contiguous(transpose(q, 2, 3)), 2, 3), k, v), out, 0);
}

TEST(Attention, BitsDoNotDependOnTheNumberOfThreads) {
  const Tensor q = as(op::sample({2, 4, 200, 32}, 1), DType::kF32), k = as(op::sample({2, 2, 150, 32}, 2), DType::kF32);
  const auto run = [&] {
    const kernel::AttentionAttrs attrs{.scale = 0.2, .causal = true, .grouped = true, .dropout_p = 0.1};
    const Tensor stretch = op::sample_stretch(1);
    const auto [out, lse] = op::call_many<2>(op::kAttention, attrs, q, k, k, Tensor(), stretch);
    const auto [dq, dk, dv] =
        op::call_many<3>(op::kAttentionBackward, attrs, out, lse, q, k, k, Tensor(), out, lse, stretch);
    std::vector<std::vector<double>> all;
    for (const Tensor& t : {out, lse, dq, dk, dv}) all.push_back(values(t));
    return all;
  };
  const int before = thread_count();
  set_thread_count(1);
  const auto one = run();
  set_thread_count(3);
  EXPECT_EQ(run(), one);
  set_thread_count(before);
}

TEST(Attention, OfNoKeysOrNoQueriesIsEmptyOrZero) {
  expect_values(scaled_dot_product_attention(op::sample({1, 2, 3}), Tensor::empty({1, 0, 3}, DType::kF64),
                                             Tensor::empty({1, 0, 2}, DType::kF64)),
                {0, 0, 0, 0});
  EXPECT_EQ(
      scaled_dot_product_attention(Tensor::empty({1, 0, 3}, DType::kF64), op::sample({1, 2, 3}), op::sample({1, 2, 3}))
          .sizes(),
      (Shape{1, 0, 3}));
}

TEST(Attention, RefusesOperandsThatDoNotFit) {
  const Tensor q = op::sample({2, 4, 3, 8}), k = op::sample({2, 2, 5, 8}), v = op::sample({2, 2, 5, 8});
  const auto message = [&](const Tensor& a, const Tensor& b, const Tensor& c, const AttentionOptions& options = {}) {
    return message_of([&] { scaled_dot_product_attention(a, b, c, options); });
  };
  EXPECT_THAT(message(q, k, v), HasSubstr("enable_gqa"));
  EXPECT_THAT(message(op::sample({2, 3, 3, 8}), k, v, {.enable_gqa = true}), HasSubstr("dimension 1"));
  EXPECT_THAT(message(q, op::sample({2, 4, 5, 7}), v), HasSubstr("differ in depth"));
  EXPECT_THAT(message(q, op::sample({2, 4, 5, 8}), op::sample({2, 4, 6, 8})), HasSubstr("differ in length"));
  EXPECT_THAT(message(q, q, as(q, DType::kF32)), HasSubstr("one dtype"));
  EXPECT_THAT(message(q, q, q, {.mask = op::sample({2, 3})}), HasSubstr("mask"));
  EXPECT_THAT(message(q, q, q, {.mask = op::sample_ints({3, 3}, 0, 2)}), HasSubstr("bool or floating, not i64"));
  EXPECT_THAT(message(q, q, q, {.mask = op::sample_bools({3, 3}), .is_causal = true}), HasSubstr("not both"));
  EXPECT_THAT(message(q, q, q, {.dropout_p = 2}), HasSubstr("dropout_p"));
}

}  // namespace
}  // namespace chorale
