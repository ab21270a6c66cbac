#include "chorale/kernel/cpu/loss/loss_loops.h"

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/loss/loss_loops.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/kernel/cpu/support/for_vectors-inl.h"
#include "chorale/vec/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {
using chorale::vec::HWY_NAMESPACE::sleef_log1p;
using chorale::vec::HWY_NAMESPACE::vlog;

// f(d) and f'(d).
template <Difference kKind, class V>
struct LossOf {
  V bound, half, scale;  // scale: of the square where there is a choice

  explicit HWY_INLINE LossOf(hn::TFromV<V> limit) {
    using T = hn::TFromV<V>;
    const hn::ScalableTag<T> d;
    bound = hn::Set(d, limit);
    half = hn::Set(d, limit / 2);
    scale = hn::Set(d, kKind == Difference::kSmooth ? T(1) / limit : T(1));
  }
  HWY_INLINE V value(V d) const {
    const V a = hn::Abs(d);
    const auto near = kKind == Difference::kHuber ? hn::Le(a, bound) : hn::Lt(a, bound);
    if constexpr (kKind == Difference::kSquare) {
      return hn::Mul(d, d);
    } else if constexpr (kKind == Difference::kAbsolute) {
      return a;
    } else if constexpr (kKind == Difference::kSmooth) {
      const V square = hn::Mul(hn::Mul(hn::Mul(d, d), scale), hn::Set(hn::DFromV<V>(), hn::TFromV<V>(0.5)));
      return hn::IfThenElse(near, square, hn::Sub(a, half));
    } else {
      const V square = hn::Mul(hn::Mul(d, d), hn::Set(hn::DFromV<V>(), hn::TFromV<V>(0.5)));
      return hn::IfThenElse(near, square, hn::Mul(bound, hn::Sub(a, half)));
    }
  }
  HWY_INLINE V slope(V d) const {
    const hn::DFromV<V> tag;
    const V one = hn::Set(tag, hn::TFromV<V>(1));
    const auto sign = [&] { return hn::IfThenElse(hn::Eq(d, hn::Zero(tag)), d, hn::CopySign(one, d)); };
    if constexpr (kKind == Difference::kSquare) {
      return hn::Add(d, d);
    } else if constexpr (kKind == Difference::kAbsolute) {
      return sign();
    } else if constexpr (kKind == Difference::kSmooth) {
      return hn::IfThenElse(hn::Lt(hn::Abs(d), bound), hn::Mul(d, scale), sign());
    } else {
      return hn::IfThenElse(hn::Le(hn::Abs(d), bound), d, hn::Mul(bound, sign()));
    }
  }
};

template <class T, class F>
HWY_INLINE auto with_kind(Difference kind, T bound, F&& f) {
  using V = hn::Vec<hn::ScalableTag<T>>;
  switch (kind) {
    case Difference::kSquare:
      return f(LossOf<Difference::kSquare, V>(bound));
    case Difference::kAbsolute:
      return f(LossOf<Difference::kAbsolute, V>(bound));
    case Difference::kSmooth:
      return f(LossOf<Difference::kSmooth, V>(bound));
    case Difference::kHuber:
      break;
  }
  return f(LossOf<Difference::kHuber, V>(bound));
}

template <class T>
HWY_INLINE void loss_row(Difference kind, T bound, const T* x, const T* y, T* out, int64_t n) {
  with_kind(kind, bound, [&](const auto& loss) HWY_ATTR {
    for_vectors<T>(
        n, [&](auto a, int64_t i) HWY_ATTR { a.store(loss.value(hn::Sub(a.load(x + i), a.load(y + i))), out + i); });
  });
}
template <class T>
HWY_INLINE T loss_sum(Difference kind, T bound, const T* x, const T* y, int64_t n) {
  return with_kind(kind, bound, [&](const auto& loss) HWY_ATTR {
    const hn::ScalableTag<T> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    auto even = hn::Zero(d), odd = hn::Zero(d);
    const auto term = [&](auto a, int64_t i) HWY_ATTR { return loss.value(hn::Sub(a.load(x + i), a.load(y + i))); };
    int64_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      even = hn::Add(even, term(Whole<T>{}, i));
      odd = hn::Add(odd, term(Whole<T>{}, i + lanes));
    }
    if (i + lanes <= n) even = hn::Add(even, term(Whole<T>{}, i)), i += lanes;
    // Behind the last element x and y are both read as 0, which costs nothing.
    if (i < n) odd = hn::Add(odd, term(Part<T>{{}, static_cast<size_t>(n - i)}, i));
    return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
  });
}
template <class T>
HWY_INLINE void loss_gradient(Difference kind, T bound, T scale, const T* x, const T* y, T* out, int64_t n) {
  const auto factor = hn::Set(hn::ScalableTag<T>(), scale);
  with_kind(kind, bound, [&](const auto& loss) HWY_ATTR {
    for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
      a.store(hn::Mul(factor, loss.slope(hn::Sub(a.load(x + i), a.load(y + i)))), out + i);
    });
  });
}

template <class T>
HWY_INLINE void bce_row(const T* x, const T* t, T* out, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto floor = hn::Set(d, T(-100));
  for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
    const auto p = a.load(x + i), target = a.load(t + i);
    // Max returns its second argument if either is NaN.
    const auto log_p = hn::Max(floor, vlog(p)), log_rest = hn::Max(floor, sleef_log1p(hn::Neg(p)));
    // (t - 1) log(1 - p) - t log(p)
    a.store(hn::NegMulAdd(target, log_p, hn::Mul(hn::Sub(target, hn::Set(d, T(1))), log_rest)), out + i);
  });
}

#define CHORALE_LOSS_LOOPS(T, suffix)                                                                    \
  void row_##suffix(Difference kind, T bound, const T* x, const T* y, T* out, int64_t n) {               \
    loss_row(kind, bound, x, y, out, n);                                                                 \
  }                                                                                                      \
  T sum_##suffix(Difference kind, T bound, const T* x, const T* y, int64_t n) {                          \
    return loss_sum(kind, bound, x, y, n);                                                               \
  }                                                                                                      \
  void gradient_##suffix(Difference kind, T bound, T scale, const T* x, const T* y, T* out, int64_t n) { \
    loss_gradient(kind, bound, scale, x, y, out, n);                                                     \
  }                                                                                                      \
  void bce_##suffix(const T* x, const T* t, T* out, int64_t n) { bce_row(x, t, out, n); }
CHORALE_LOSS_LOOPS(float, f32)
CHORALE_LOSS_LOOPS(double, f64)
#undef CHORALE_LOSS_LOOPS

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {

#define CHORALE_LOSS_LOOPS(T, suffix)                                                                      \
  HWY_EXPORT(row_##suffix);                                                                                \
  HWY_EXPORT(sum_##suffix);                                                                                \
  HWY_EXPORT(gradient_##suffix);                                                                           \
  HWY_EXPORT(bce_##suffix);                                                                                \
  void difference_row(Difference kind, T bound, const T* x, const T* y, T* out, int64_t n) {               \
    HWY_DYNAMIC_DISPATCH(row_##suffix)(kind, bound, x, y, out, n);                                         \
  }                                                                                                        \
  T difference_sum(Difference kind, T bound, const T* x, const T* y, int64_t n) {                          \
    return HWY_DYNAMIC_DISPATCH(sum_##suffix)(kind, bound, x, y, n);                                       \
  }                                                                                                        \
  void difference_gradient(Difference kind, T bound, T scale, const T* x, const T* y, T* out, int64_t n) { \
    HWY_DYNAMIC_DISPATCH(gradient_##suffix)(kind, bound, scale, x, y, out, n);                             \
  }                                                                                                        \
  void binary_cross_entropy_row(const T* x, const T* t, T* out, int64_t n) {                               \
    HWY_DYNAMIC_DISPATCH(bce_##suffix)(x, t, out, n);                                                      \
  }
CHORALE_LOSS_LOOPS(float, f32)
CHORALE_LOSS_LOOPS(double, f64)
#undef CHORALE_LOSS_LOOPS

}  // namespace chorale::kernel::cpu
#endif
