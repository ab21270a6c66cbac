// The loops of optimizers against the formulas of vec/update.h, written out in double, element by element.
#include "chorale/vec/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

constexpr UpdateRule kRules[] = {UpdateRule::kSgd,
                                 UpdateRule::kSgdMomentum,
                                 UpdateRule::kSgdNesterov,
                                 UpdateRule::kAdam,
                                 UpdateRule::kAmsgrad,
                                 UpdateRule::kAdagrad,
                                 UpdateRule::kRmsprop,
                                 UpdateRule::kRmspropMomentum,
                                 UpdateRule::kRmspropCentered,
                                 UpdateRule::kRmspropCenteredMomentum,
                                 UpdateRule::kLambMoments,
                                 UpdateRule::kLambApply,
                                 UpdateRule::kMomentsOnly,
                                 UpdateRule::kNadam,
                                 UpdateRule::kAdamax,
                                 UpdateRule::kAdadelta,
                                 UpdateRule::kAsgd,
                                 UpdateRule::kRprop};
static_assert(std::size(kRules) == kUpdateRuleCount);

constexpr UpdateParams kParams{.sign = -1,
                               .weight_decay = 0.125,
                               .keep = 0.75,
                               .rate = 0.5,
                               .decay1 = 0.875,
                               .gain1 = 0.375,
                               .decay2 = 0.9375,
                               .gain2 = 0.25,
                               .scale1 = 1.5,
                               .root_scale = 1.25,
                               .eps = 0.0625};

struct Element {
  double w, g, s0, s1, s2;
};

double lamb_step(const Element& x, const UpdateParams& p) {
  return p.scale1 * x.s0 / (std::sqrt(x.s1) * p.root_scale + p.eps) + p.weight_decay * x.w;
}

Element expected(UpdateRule rule, Element x, const UpdateParams& p) {
  const bool lamb = rule == UpdateRule::kLambMoments || rule == UpdateRule::kLambApply;
  const double g = p.sign * x.g + (lamb ? 0 : p.weight_decay * x.w);
  if (!lamb) x.w *= p.keep;
  switch (rule) {
    case UpdateRule::kSgd:
      x.w -= p.rate * g;
      break;
    case UpdateRule::kSgdMomentum:
    case UpdateRule::kSgdNesterov:
      x.s0 = p.decay1 * x.s0 + p.gain1 * g;
      x.w -= p.rate * (rule == UpdateRule::kSgdNesterov ? g + p.decay1 * x.s0 : x.s0);
      break;
    case UpdateRule::kAdam:
    case UpdateRule::kAmsgrad:
      x.s0 += p.gain1 * (g - x.s0);
      x.s1 = p.decay2 * x.s1 + p.gain2 * g * g;
      if (rule == UpdateRule::kAmsgrad) x.s2 = std::max(x.s2, x.s1);
      x.w -= p.rate * x.s0 / (std::sqrt(rule == UpdateRule::kAmsgrad ? x.s2 : x.s1) * p.root_scale + p.eps);
      break;
    case UpdateRule::kAdagrad:
      x.s0 += g * g;
      x.w -= p.rate * g / (std::sqrt(x.s0) + p.eps);
      break;
    case UpdateRule::kRmsprop:
    case UpdateRule::kRmspropMomentum:
    case UpdateRule::kRmspropCentered:
    case UpdateRule::kRmspropCenteredMomentum: {
      const bool centered = rule == UpdateRule::kRmspropCentered || rule == UpdateRule::kRmspropCenteredMomentum;
      const bool momentum = rule == UpdateRule::kRmspropMomentum || rule == UpdateRule::kRmspropCenteredMomentum;
      x.s0 = p.decay2 * x.s0 + p.gain2 * g * g;
      if (centered) x.s2 += p.gain2 * (g - x.s2);
      const double step = g / (std::sqrt(x.s0 - (centered ? x.s2 * x.s2 : 0)) + p.eps);
      if (momentum) x.s1 = p.decay1 * x.s1 + step;
      x.w -= p.rate * (momentum ? x.s1 : step);
      break;
    }
    case UpdateRule::kLambMoments:
      x.s0 += p.gain1 * (g - x.s0);
      x.s1 = p.decay2 * x.s1 + p.gain2 * g * g;
      break;
    case UpdateRule::kLambApply:
      x.w -= p.rate * lamb_step(x, p);
      break;
    case UpdateRule::kMomentsOnly:
    case UpdateRule::kNadam:
      x.s0 += p.gain1 * (g - x.s0);
      x.s1 = p.decay2 * x.s1 + p.gain2 * g * g;
      x.w -= rule == UpdateRule::kNadam ? (p.rate * g + p.scale1 * x.s0) / (std::sqrt(x.s1) * p.root_scale + p.eps)
                                        : p.rate * x.s0;
      break;
    case UpdateRule::kAdamax:
      x.s0 += p.gain1 * (g - x.s0);
      x.s1 = std::max(p.decay2 * x.s1, std::abs(g) + p.eps);
      x.w -= p.rate * x.s0 / x.s1;
      break;
    case UpdateRule::kAdadelta: {
      x.s0 = p.decay2 * x.s0 + p.gain2 * g * g;
      const double u = g * std::sqrt(x.s1 + p.eps) / std::sqrt(x.s0 + p.eps);
      x.s1 = p.decay2 * x.s1 + p.gain2 * u * u;
      x.w -= p.rate * u;
      break;
    }
    case UpdateRule::kAsgd:
      x.w -= p.rate * g;
      x.s0 += p.gain1 * (x.w - x.s0);
      break;
    case UpdateRule::kRprop:
      x.s1 = std::clamp(x.s1 * (g * x.s0 > 0 ? p.gain1 : g * x.s0 < 0 ? p.decay1 : 1), p.eps, p.scale1);
      x.s0 = g * x.s0 < 0 ? 0 : g;
      x.w -= x.s0 > 0 ? x.s1 : x.s0 < 0 ? -x.s1 : 0;
      break;
  }
  return x;
}

// Values that every dtype holds exactly.
Element element(int64_t i) {
  const auto part = [&](int64_t factor) { return static_cast<double>(i * factor % 17 - 8) / 16; };
  return {part(5), part(7), part(3), 2 + part(11), part(13)};
}

template <class T, class C>
void expect_rule(UpdateRule rule, int64_t n, double tolerance) {
  const auto size = static_cast<size_t>(n);
  std::vector<C> weight(size), s0(size), s1(size), s2(size);
  std::vector<T> gradient(size), rounded(size);
  double sums[2] = {3, 4}, expected_sums[2] = {3, 4};
  const bool rmsprop =
      (rule >= UpdateRule::kRmsprop && rule <= UpdateRule::kRmspropCenteredMomentum) || rule == UpdateRule::kAdadelta;
  for (size_t i = 0; i < size; ++i) {
    Element x = element(static_cast<int64_t>(i));
    if (rmsprop || rule == UpdateRule::kAdagrad) x.s0 += 2;  // it stands under a root
    weight[i] = static_cast<C>(x.w), rounded[i] = T(static_cast<C>(x.w)), gradient[i] = T(static_cast<C>(x.g));
    s0[i] = static_cast<C>(x.s0), s1[i] = static_cast<C>(x.s1), s2[i] = static_cast<C>(x.s2);
  }
  UpdateSpan span{weight.data(), rounded.data(), gradient.data(), {s0.data(), s1.data(), s2.data()}, n, sums};
  update_loop(rule, dtype_of<T>)(span, kParams);
  for (size_t i = 0; i < size; ++i) {
    Element x = element(static_cast<int64_t>(i));
    if (rmsprop || rule == UpdateRule::kAdagrad) x.s0 += 2;
    const Element y = expected(rule, x, kParams);
    ASSERT_NEAR(static_cast<double>(weight[i]), y.w, tolerance) << i;
    ASSERT_NEAR(static_cast<double>(s0[i]), y.s0, tolerance) << i;
    ASSERT_NEAR(static_cast<double>(s1[i]), y.s1, tolerance) << i;
    ASSERT_NEAR(static_cast<double>(s2[i]), y.s2, tolerance) << i;
    if (is_half(dtype_of<T>)) {
      const auto bits = static_cast<C>(rounded[i]);
      ASSERT_EQ(bits, static_cast<C>(T(weight[i]))) << i;
    }
    if (rule == UpdateRule::kLambMoments) {
      expected_sums[0] += y.w * y.w;
      expected_sums[1] += lamb_step(y, kParams) * lamb_step(y, kParams);
    }
  }
  EXPECT_NEAR(sums[0], expected_sums[0], tolerance * static_cast<double>(n + 1));
  EXPECT_NEAR(sums[1], expected_sums[1], 10 * tolerance * static_cast<double>(n + 1));
}

TEST(Update, EveryRuleFollowsItsFormulaInEveryDTypeAndLength) {
  for_each_target([](const char* target) {
    for (UpdateRule rule : kRules) {
      for (int64_t n : {0, 1, 3, 16, 37, 64, 101}) {
        SCOPED_TRACE(testing::Message() << target << ", rule " << static_cast<int>(rule) << ", n " << n);
        expect_rule<float, float>(rule, n, 2e-6);
        expect_rule<double, double>(rule, n, 4e-15);
        expect_rule<float16, float>(rule, n, 2e-6);
        expect_rule<bfloat16, float>(rule, n, 2e-6);
      }
    }
  });
}

TEST(Update, AnAverageThatHasNotBegunIsTheWeightItself) {
  // 0.1 + 0.7 - 0.7 is not 0.1.
  std::vector<double> weight{0.1}, gradient{0}, average{0.7};
  update_loop(UpdateRule::kAsgd, DType::kF64)({weight.data(), nullptr, gradient.data(), {average.data()}, 1},
                                              {.gain1 = 1});
  EXPECT_EQ(average, weight);
}

TEST(Update, AnElementsResultDoesNotDependOnItsPlace) {
  // Pieces of any length give the bits of the whole.
  constexpr size_t kCount = 61;
  std::vector<float> whole(kCount), pieces, gradient(kCount), m(kCount), v(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const Element x = element(static_cast<int64_t>(i));
    whole[i] = static_cast<float>(x.w / 3), gradient[i] = static_cast<float>(x.g / 7);
    m[i] = static_cast<float>(x.s0 / 5), v[i] = static_cast<float>(x.s1 / 9);
  }
  pieces = whole;
  auto m2 = m, v2 = v;
  const Update adam = update_loop(UpdateRule::kAdam, DType::kF32);
  adam({whole.data(), nullptr, gradient.data(), {m.data(), v.data()}, kCount}, kParams);
  for (size_t at = 0, length = 1; at < kCount; at += length, ++length) {
    const size_t n = std::min(length, kCount - at);
    adam({pieces.data() + at, nullptr, gradient.data() + at, {m2.data() + at, v2.data() + at}, static_cast<int64_t>(n)},
         kParams);
  }
  EXPECT_EQ(whole, pieces);
  EXPECT_EQ(m, m2);
  EXPECT_EQ(v, v2);
}

TEST(Update, AParameterThatWasOverwrittenReplacesItsMaster) {
  const UpdateParams still{.rate = 0};
  const float fine = 1.0f + 0x1p-10f;  // rounds to 1 in bf16
  std::vector<float> master{fine, fine, fine};
  std::vector<bfloat16> parameter{bfloat16(1.0f), bfloat16(5.0f), bfloat16(-1.0f)}, gradient(3);
  update_loop(UpdateRule::kSgd, DType::kBF16)({master.data(), parameter.data(), gradient.data(), {}, 3}, still);
  EXPECT_EQ(master, (std::vector<float>{fine, 5, -1}));
}

template <class T>
void expect_scaling() {
  for (size_t n : {size_t{0}, size_t{1}, size_t{40}, size_t{67}}) {
    std::vector<T> values(n, T(3.0f));
    EXPECT_TRUE(scale_checked_loop(dtype_of<T>)(values.data(), static_cast<int64_t>(n), 0.25));
    EXPECT_EQ(values, std::vector<T>(n, T(0.75f)));
    for (size_t bad = 0; bad < n; ++bad) {
      for (float value : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
        std::vector<T> tainted(n, T(1.0f));
        tainted[bad] = T(value);
        EXPECT_FALSE(scale_checked_loop(dtype_of<T>)(tainted.data(), static_cast<int64_t>(n), 0.0)) << n << " " << bad;
      }
    }
  }
}

TEST(Update, ScalingTellsWhetherEverythingWasFinite) {
  for_each_target([](const char*) {
    expect_scaling<float>();
    expect_scaling<double>();
    expect_scaling<float16>();
    expect_scaling<bfloat16>();
  });
}

}  // namespace
}  // namespace chorale::vec
