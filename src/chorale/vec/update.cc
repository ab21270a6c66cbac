#include "chorale/vec/update.h"

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/update.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/vec/storage-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The parameters of a rule in every lane of a vector.
template <class C>
struct Coefficients {
  using D = hn::ScalableTag<C>;
  using V = hn::Vec<D>;
  V sign, weight_decay, keep, rate, decay1, gain1, decay2, gain2, scale1, root_scale, eps;

  explicit HWY_INLINE Coefficients(const UpdateParams& p)
      : sign(all(p.sign)),
        weight_decay(all(p.weight_decay)),
        keep(all(p.keep)),
        rate(all(p.rate)),
        decay1(all(p.decay1)),
        gain1(all(p.gain1)),
        decay2(all(p.decay2)),
        gain2(all(p.gain2)),
        scale1(all(p.scale1)),
        root_scale(all(p.root_scale)),
        eps(all(p.eps)) {}
  static HWY_INLINE V all(double value) { return hn::Set(D(), static_cast<C>(value)); }
};

// One vector of a parameter and what belongs to it.
template <class C>
struct Lanes {
  using V = typename Coefficients<C>::V;
  V w, g, s0, s1, s2;
};

// Which states a rule reads and writes, as bits.
constexpr uint32_t states_read(UpdateRule rule) {
  switch (rule) {
    case UpdateRule::kSgd:
      return 0;
    case UpdateRule::kSgdMomentum:
    case UpdateRule::kSgdNesterov:
    case UpdateRule::kAdagrad:
    case UpdateRule::kRmsprop:
    case UpdateRule::kAsgd:
      return 1;
    case UpdateRule::kAdam:
    case UpdateRule::kMomentsOnly:
    case UpdateRule::kNadam:
    case UpdateRule::kAdamax:
    case UpdateRule::kAdadelta:
    case UpdateRule::kRprop:
    case UpdateRule::kRmspropMomentum:
    case UpdateRule::kLambMoments:
    case UpdateRule::kLambApply:
      return 3;
    case UpdateRule::kRmspropCentered:
      return 5;
    case UpdateRule::kAmsgrad:
    case UpdateRule::kRmspropCenteredMomentum:
      return 7;
  }
  return 0;
}

template <UpdateRule kRule, class C>
HWY_INLINE void apply_sgd(Lanes<C>& x, const Coefficients<C>& c) {
  if constexpr (kRule == UpdateRule::kSgd) {
    x.w = hn::NegMulAdd(c.rate, x.g, x.w);
    return;
  }
  x.s0 = hn::MulAdd(c.decay1, x.s0, hn::Mul(c.gain1, x.g));
  const auto step = kRule == UpdateRule::kSgdNesterov ? hn::MulAdd(c.decay1, x.s0, x.g) : x.s0;
  x.w = hn::NegMulAdd(c.rate, step, x.w);
}

template <class C>
HWY_INLINE void move_moments(Lanes<C>& x, const Coefficients<C>& c) {
  x.s0 = hn::MulAdd(c.gain1, hn::Sub(x.g, x.s0), x.s0);
  x.s1 = hn::MulAdd(c.decay2, x.s1, hn::Mul(c.gain2, hn::Mul(x.g, x.g)));
}

template <UpdateRule kRule, class C>
HWY_INLINE void apply_adam(Lanes<C>& x, const Coefficients<C>& c) {
  move_moments(x, c);
  auto second = x.s1;
  if constexpr (kRule == UpdateRule::kAmsgrad) second = x.s2 = hn::Max(x.s2, x.s1);
  const auto divisor = hn::MulAdd(hn::Sqrt(second), c.root_scale, c.eps);
  x.w = hn::NegMulAdd(c.rate, hn::Div(x.s0, divisor), x.w);
}

template <UpdateRule kRule, class C>
HWY_INLINE void apply_rmsprop(Lanes<C>& x, const Coefficients<C>& c) {
  x.s0 = hn::MulAdd(c.decay2, x.s0, hn::Mul(c.gain2, hn::Mul(x.g, x.g)));
  auto second = x.s0;
  if constexpr ((states_read(kRule) & 4u) != 0) {
    x.s2 = hn::MulAdd(c.gain2, hn::Sub(x.g, x.s2), x.s2);
    second = hn::NegMulAdd(x.s2, x.s2, second);
  }
  auto step = hn::Div(x.g, hn::Add(hn::Sqrt(second), c.eps));
  if constexpr ((states_read(kRule) & 2u) != 0) step = x.s1 = hn::MulAdd(c.decay1, x.s1, step);
  x.w = hn::NegMulAdd(c.rate, step, x.w);
}

template <UpdateRule kRule, class C>
HWY_INLINE void apply_of_adams_kind(Lanes<C>& x, const Coefficients<C>& c) {
  if constexpr (kRule == UpdateRule::kAdamax) {
    x.s0 = hn::MulAdd(c.gain1, hn::Sub(x.g, x.s0), x.s0);
    x.s1 = hn::Max(hn::Mul(c.decay2, x.s1), hn::Add(hn::Abs(x.g), c.eps));
    x.w = hn::NegMulAdd(c.rate, hn::Div(x.s0, x.s1), x.w);
    return;
  }
  move_moments(x, c);
  if constexpr (kRule == UpdateRule::kMomentsOnly) {
    x.w = hn::NegMulAdd(c.rate, x.s0, x.w);
  } else {
    const auto divisor = hn::MulAdd(hn::Sqrt(x.s1), c.root_scale, c.eps);
    x.w = hn::Sub(x.w, hn::Div(hn::MulAdd(c.rate, x.g, hn::Mul(c.scale1, x.s0)), divisor));
  }
}

template <class C>
HWY_INLINE void apply_adadelta(Lanes<C>& x, const Coefficients<C>& c) {
  x.s0 = hn::MulAdd(c.decay2, x.s0, hn::Mul(c.gain2, hn::Mul(x.g, x.g)));
  const auto u = hn::Mul(hn::Div(hn::Sqrt(hn::Add(x.s1, c.eps)), hn::Sqrt(hn::Add(x.s0, c.eps))), x.g);
  x.s1 = hn::MulAdd(c.decay2, x.s1, hn::Mul(c.gain2, hn::Mul(u, u)));
  x.w = hn::NegMulAdd(c.rate, u, x.w);
}

template <class C>
HWY_INLINE void apply_asgd(Lanes<C>& x, const Coefficients<C>& c) {
  x.w = hn::NegMulAdd(c.rate, x.g, x.w);
  const auto whole = hn::Eq(c.gain1, Coefficients<C>::all(1));
  x.s0 = hn::IfThenElse(whole, x.w, hn::MulAdd(c.gain1, hn::Sub(x.w, x.s0), x.s0));
}

template <class C>
HWY_INLINE void apply_rprop(Lanes<C>& x, const Coefficients<C>& c) {
  const auto zero = Coefficients<C>::all(0);
  const auto product = hn::Mul(x.g, x.s0);
  const auto turned = hn::Lt(product, zero);
  const auto grown = hn::IfThenElse(hn::Gt(product, zero), hn::Mul(c.gain1, x.s1), x.s1);
  x.s1 = hn::Clamp(hn::IfThenElse(turned, hn::Mul(c.decay1, x.s1), grown), c.eps, c.scale1);
  x.s0 = hn::IfThenZeroElse(turned, x.g);
  x.w = hn::Sub(x.w, hn::IfThenZeroElse(hn::Eq(x.s0, zero), hn::CopySign(x.s1, x.s0)));
}

template <class C>
HWY_INLINE typename Lanes<C>::V lamb_step(const Lanes<C>& x, const Coefficients<C>& c) {
  const auto divisor = hn::MulAdd(hn::Sqrt(x.s1), c.root_scale, c.eps);
  return hn::MulAdd(c.weight_decay, x.w, hn::Div(hn::Mul(c.scale1, x.s0), divisor));
}

template <UpdateRule kRule, class C>
HWY_INLINE void apply(Lanes<C>& x, const Coefficients<C>& c) {
  constexpr bool kLamb = kRule == UpdateRule::kLambMoments || kRule == UpdateRule::kLambApply;
  if constexpr (kRule != UpdateRule::kLambApply) x.g = hn::Mul(c.sign, x.g);
  if constexpr (!kLamb) {
    x.g = hn::MulAdd(c.weight_decay, x.w, x.g);
    x.w = hn::Mul(c.keep, x.w);
  }
  if constexpr (kRule <= UpdateRule::kSgdNesterov) {
    apply_sgd<kRule>(x, c);
  } else if constexpr (kRule <= UpdateRule::kAmsgrad) {
    apply_adam<kRule>(x, c);
  } else if constexpr (kRule == UpdateRule::kAdagrad) {
    x.s0 = hn::MulAdd(x.g, x.g, x.s0);
    x.w = hn::NegMulAdd(c.rate, hn::Div(x.g, hn::Add(hn::Sqrt(x.s0), c.eps)), x.w);
  } else if constexpr (kRule == UpdateRule::kAdadelta) {
    apply_adadelta(x, c);
  } else if constexpr (kRule == UpdateRule::kAsgd) {
    apply_asgd(x, c);
  } else if constexpr (kRule == UpdateRule::kRprop) {
    apply_rprop(x, c);
  } else if constexpr (kRule >= UpdateRule::kMomentsOnly) {
    apply_of_adams_kind<kRule>(x, c);
  } else if constexpr (!kLamb) {
    apply_rmsprop<kRule>(x, c);
  } else if constexpr (kRule == UpdateRule::kLambMoments) {
    move_moments(x, c);
  } else {
    x.w = hn::NegMulAdd(c.rate, lamb_step(x, c), x.w);
  }
}

// All lanes, or the first few: the whole ones are plain loads and stores.
template <bool kWhole, class T>
HWY_INLINE typename Storage<T>::V load_lanes(const T* from, [[maybe_unused]] size_t count) {
  if constexpr (kWhole) return Storage<T>::load(from);
  return Storage<T>::load_first(from, count);
}
template <bool kWhole, class T>
HWY_INLINE void store_lanes(typename Storage<T>::V v, T* to, [[maybe_unused]] size_t count) {
  if constexpr (kWhole) {
    Storage<T>::store(v, to);
  } else {
    Storage<T>::store_first(v, to, count);
  }
}

// One vector of a parameter, from memory to memory.
template <UpdateRule kRule, class T>
struct Step {
  using C = typename Storage<T>::Compute;
  using D = hn::ScalableTag<C>;
  using V = hn::Vec<D>;
  static constexpr uint32_t kStates = states_read(kRule);
  static constexpr bool kWritesWeight = kRule != UpdateRule::kLambMoments;
  static constexpr bool kWritesStates = kRule != UpdateRule::kLambApply;

  Coefficients<C> c;
  C* weight;
  T* rounded;
  const T* gradient;
  C *state0, *state1, *state2;
  V weight_squares = hn::Zero(D()), step_squares = hn::Zero(D());

  HWY_INLINE Step(const UpdateSpan& span, const UpdateParams& params)
      : c(params),
        weight(static_cast<C*>(span.weight)),
        rounded(static_cast<T*>(span.rounded)),
        gradient(static_cast<const T*>(span.gradient)),
        state0(static_cast<C*>(span.state[0])),
        state1(static_cast<C*>(span.state[1])),
        state2(static_cast<C*>(span.state[2])) {}

  template <bool kWhole>
  HWY_INLINE void at(size_t i, size_t count) {
    Lanes<C> x;
    x.w = load_lanes<kWhole>(weight + i, count);
    if constexpr (kIsHalf<T>) {
      const V own = load_lanes<kWhole>(rounded + i, count);
      const V expected = from_bits16(T(), D(), to_bits16(T(), D(), x.w));
      x.w = hn::IfThenElse(hn::Eq(expected, own), x.w, own);
    }
    if constexpr (kRule != UpdateRule::kLambApply) x.g = load_lanes<kWhole>(gradient + i, count);
    if constexpr ((kStates & 1u) != 0) x.s0 = load_lanes<kWhole>(state0 + i, count);
    if constexpr ((kStates & 2u) != 0) x.s1 = load_lanes<kWhole>(state1 + i, count);
    if constexpr ((kStates & 4u) != 0) x.s2 = load_lanes<kWhole>(state2 + i, count);
    apply<kRule>(x, c);
    if constexpr (kRule == UpdateRule::kLambMoments) {
      // Lanes behind the end hold zeros, whose step is 0 / eps.
      const V step = lamb_step(x, c);
      weight_squares = hn::MulAdd(x.w, x.w, weight_squares);
      step_squares = hn::MulAdd(step, step, step_squares);
    }
    if constexpr (kWritesStates && (kStates & 1u) != 0) store_lanes<kWhole>(x.s0, state0 + i, count);
    if constexpr (kWritesStates && (kStates & 2u) != 0) store_lanes<kWhole>(x.s1, state1 + i, count);
    if constexpr (kWritesStates && (kStates & 4u) != 0) store_lanes<kWhole>(x.s2, state2 + i, count);
    if constexpr (kWritesWeight || kIsHalf<T>) store_lanes<kWhole>(x.w, weight + i, count);
    if constexpr (kWritesWeight && kIsHalf<T>) store_lanes<kWhole>(x.w, rounded + i, count);
  }
};

template <UpdateRule kRule, class T>
void update(const UpdateSpan& span, const UpdateParams& params) {
  constexpr size_t kLanes = Storage<T>::kLanes;
  Step<kRule, T> step(span, params);
  const auto n = static_cast<size_t>(span.n);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step.template at<true>(i, kLanes);
  if (i < n) step.template at<false>(i, n - i);
  if constexpr (kRule == UpdateRule::kLambMoments) {
    using D = typename Step<kRule, T>::D;
    span.sums[0] += static_cast<double>(hn::GetLane(hn::SumOfLanes(D(), step.weight_squares)));
    span.sums[1] += static_cast<double>(hn::GetLane(hn::SumOfLanes(D(), step.step_squares)));
  }
}

template <class T>
bool scale_checked(void* x, int64_t length, double factor) {
  using S = Storage<T>;
  using D = typename S::D;
  const D d;
  auto* const values = static_cast<T*>(x);
  const auto scale = hn::Set(d, static_cast<typename S::Compute>(factor));
  // x - x is 0 for finite x and NaN otherwise, and a sum with NaN stays NaN.
  auto poison = hn::Zero(d);
  const auto n = static_cast<size_t>(length);
  size_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) {
    const auto v = S::load(values + i);
    poison = hn::Add(poison, hn::Sub(v, v));
    S::store(hn::Mul(v, scale), values + i);
  }
  if (const size_t count = n - i; count != 0) {
    const auto v = S::load_first(values + i, count);
    poison = hn::Add(poison, hn::Sub(v, v));
    S::store_first(hn::Mul(v, scale), values + i, count);
  }
  return hn::AllTrue(d, hn::Eq(poison, hn::Zero(d)));
}

template <UpdateRule kRule>
Update update_of(DType dtype) {
  return dtype == DType::kF32   ? &update<kRule, float>
         : dtype == DType::kF64 ? &update<kRule, double>
         : dtype == DType::kF16 ? &update<kRule, float16>
                                : &update<kRule, bfloat16>;
}

Update find_update(UpdateRule rule, DType dtype) {
  using Find = Update (*)(DType);
  static constexpr Find kByRule[kUpdateRuleCount] = {
      update_of<UpdateRule::kSgd>,
      update_of<UpdateRule::kSgdMomentum>,
      update_of<UpdateRule::kSgdNesterov>,
      update_of<UpdateRule::kAdam>,
      update_of<UpdateRule::kAmsgrad>,
      update_of<UpdateRule::kAdagrad>,
      update_of<UpdateRule::kRmsprop>,
      update_of<UpdateRule::kRmspropMomentum>,
      update_of<UpdateRule::kRmspropCentered>,
      update_of<UpdateRule::kRmspropCenteredMomentum>,
      update_of<UpdateRule::kLambMoments>,
      update_of<UpdateRule::kLambApply>,
      update_of<UpdateRule::kMomentsOnly>,
      update_of<UpdateRule::kNadam>,
      update_of<UpdateRule::kAdamax>,
      update_of<UpdateRule::kAdadelta>,
      update_of<UpdateRule::kAsgd>,
      update_of<UpdateRule::kRprop>,
  };
  return kByRule[static_cast<size_t>(rule)](dtype);
}

ScaleChecked find_scale_checked(DType dtype) {
  return dtype == DType::kF32   ? &scale_checked<float>
         : dtype == DType::kF64 ? &scale_checked<double>
         : dtype == DType::kF16 ? &scale_checked<float16>
                                : &scale_checked<bfloat16>;
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {

HWY_EXPORT(find_update);
HWY_EXPORT(find_scale_checked);

Update update_loop(UpdateRule rule, DType dtype) {
  CHORALE_INVARIANT(is_floating(dtype), "an optimizer was given ", dtype);
  return HWY_DYNAMIC_DISPATCH(find_update)(rule, dtype);
}
ScaleChecked scale_checked_loop(DType dtype) {
  CHORALE_INVARIANT(is_floating(dtype), "a gradient of ", dtype, " is to be scaled");
  return HWY_DYNAMIC_DISPATCH(find_scale_checked)(dtype);
}

}  // namespace chorale::vec
#endif
