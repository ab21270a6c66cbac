// The loops of optimizers: one pass over weights, gradients and state, each element on its own, so that cutting the
// work anywhere (into threads, into parameters) never changes a bit. One thread; callers cut.
#pragma once

#include <cstdint>

#include "chorale/base/dtype.h"

namespace chorale::vec {

// g below is sign * gradient + weight_decay * w, and every rule begins with w *= keep. Symbols are fields of
// UpdateParams; s0, s1, s2 are the states.
enum class UpdateRule : uint8_t {
  kSgd,          // w -= rate * g
  kSgdMomentum,  // s0 = decay1 * s0 + gain1 * g; w -= rate * s0
  kSgdNesterov,  // s0 likewise; w -= rate * (g + decay1 * s0)
  kAdam,         // s0 += gain1 * (g - s0); s1 = decay2 * s1 + gain2 * g²; w -= rate * s0 / (√s1 * root_scale + eps)
  kAmsgrad,      // the same with s2 = max(s2, s1) under the root
  kAdagrad,      // s0 += g²; w -= rate * g / (√s0 + eps)
  kRmsprop,      // s0 = decay2 * s0 + gain2 * g²; w -= rate * g / (√s0 + eps)
  kRmspropMomentum,  // the same step goes into s1 = decay1 * s1 + step; w -= rate * s1
  kRmspropCentered,  // s2 += gain2 * (g - s2), and s0 - s2² under the root
  kRmspropCenteredMomentum,
  // Two passes, between which the caller turns the sums into a rate. g has no weight_decay here: it is part of
  // u = scale1 * s0 / (√s1 * root_scale + eps) + weight_decay * w, with s0 and s1 as in kAdam.
  kLambMoments,  // s0, s1; adds Σ w² and Σ u² to sums
  kLambApply,    // w -= rate * u
  kMomentsOnly,  // s0, s1 as in kAdam; w -= rate * s0
  kNadam,        // s0, s1 as in kAdam; w -= (rate * g + scale1 * s0) / (√s1 * root_scale + eps)
  kAdamax,       // s0 as in kAdam; s1 = max(decay2 * s1, |g| + eps); w -= rate * s0 / s1
  kAdadelta,  // s0 = decay2 * s0 + gain2 * g²; u = g * √(s1 + eps) / √(s0 + eps); s1 likewise of u²; w -= rate * u
  kAsgd,      // w -= rate * g; s0 += gain1 * (w - s0), exactly w where gain1 is 1
  // s1 *= gain1 where g * s0 > 0, decay1 where it is < 0, and is kept in [eps, scale1]; s0 = g, or 0 where g * s0 < 0;
  // w -= s1 * sign(s0)
  kRprop,
};
inline constexpr int kUpdateRuleCount = 18;

struct UpdateParams {
  double sign = 1, weight_decay = 0, keep = 1, rate = 0;
  double decay1 = 0, gain1 = 0, decay2 = 0, gain2 = 0;
  double scale1 = 1, root_scale = 1, eps = 0;
};

// A stretch of one parameter. Weights and states are of compute_of(dtype). For the 16-bit types `weight` is the master
// copy in f32 and `rounded` the parameter itself; a master that does not round to its parameter was overtaken by
// a write to the parameter (a checkpoint, a broadcast), and is taken from there.
struct UpdateSpan {
  void* weight = nullptr;
  void* rounded = nullptr;         // of dtype; only for the 16-bit types
  const void* gradient = nullptr;  // of dtype
  void* state[3] = {};
  int64_t n = 0;
  double* sums = nullptr;  // two; only kLambMoments
};

using Update = void (*)(const UpdateSpan& span, const UpdateParams& params);
// dtype is f16, bf16, f32 or f64.
Update update_loop(UpdateRule rule, DType dtype);

// x *= factor in place; false when an element was infinite or NaN before. Same dtypes.
using ScaleChecked = bool (*)(void* x, int64_t n, double factor);
ScaleChecked scale_checked_loop(DType dtype);

}  // namespace chorale::vec
