#include "chorale/kernel/cpu/norm/row_arithmetic.h"

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/norm/row_arithmetic.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/kernel/cpu/support/for_vectors-inl.h"
#include "chorale/vec/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {
using chorale::vec::HWY_NAMESPACE::vexp;

// A Factor in a register, or behind a pointer.
template <class T>
struct Number {
  hn::Vec<hn::ScalableTag<T>> value;
  explicit HWY_INLINE Number(const Factor<T>& f) : value(hn::Set(hn::ScalableTag<T>(), f.value)) {}
  template <class A>
  HWY_INLINE auto at(const A&, int64_t) const {
    return value;
  }
};
template <class T>
struct Numbers {
  const T* values;
  explicit HWY_INLINE Numbers(const Factor<T>& f) : values(f.values) {}
  template <class A>
  HWY_INLINE auto at(const A& access, int64_t i) const {
    return access.load(values + i);
  }
};

template <template <class> class F, class T>
HWY_INLINE void standardize_by(const T* x, const Standardize<T>& by, T* y, int64_t n) {
  const F<T> mean(by.mean), scale(by.scale), shift(by.shift);
  for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
    a.store(hn::MulAdd(hn::Sub(a.load(x + i), mean.at(a, i)), scale.at(a, i), shift.at(a, i)), y + i);
  });
}
template <class T>
HWY_INLINE void standardize(const T* x, const Standardize<T>& by, T* y, int64_t n) {
  by.mean.values ? standardize_by<Numbers>(x, by, y, n) : standardize_by<Number>(x, by, y, n);
}

template <bool kWeighted, class T>
HWY_INLINE NormSums<T> sums_of(const T* dy, const T* x, const T* weight, T mean, T rstd, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto center = hn::Set(d, mean);
  // Two accumulators each hide the latency of the additions.
  auto g0 = hn::Zero(d), g1 = g0, gz0 = g0, gz1 = g0;
  const auto step = [&](auto a, int64_t i, auto& g, auto& gz) HWY_ATTR {
    auto v = a.load(dy + i);
    if constexpr (kWeighted) v = hn::Mul(v, a.load(weight + i));
    g = hn::Add(g, v);
    gz = hn::MulAdd(v, hn::Sub(a.load(x + i), center), gz);
  };
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    step(Whole<T>{}, i, g0, gz0);
    step(Whole<T>{}, i + lanes, g1, gz1);
  }
  // Behind the last element dy is read as 0.
  for (; i < n; i += lanes) {
    i + lanes <= n ? step(Whole<T>{}, i, g0, gz0) : step(Part<T>{{}, static_cast<size_t>(n - i)}, i, g0, gz0);
  }
  return {hn::GetLane(hn::SumOfLanes(d, hn::Add(g0, g1))), hn::GetLane(hn::SumOfLanes(d, hn::Add(gz0, gz1))) * rstd};
}
template <class T>
HWY_INLINE NormSums<T> sums(const T* dy, const T* x, const T* weight, T mean, T rstd, int64_t n) {
  return weight ? sums_of<true>(dy, x, weight, mean, rstd, n) : sums_of<false>(dy, x, weight, mean, rstd, n);
}

template <bool kWeighted, bool kSums, class T>
HWY_INLINE void norm_backward_by(const T* dy, const T* x, const NormBackward<T>& by, T* dx, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto mean = hn::Set(d, by.mean), rstd = hn::Set(d, by.rstd), a = hn::Set(d, by.a), b = hn::Set(d, by.b);
  for_vectors<T>(n, [&](auto access, int64_t i) HWY_ATTR {
    const auto v = access.load(dy + i);
    const auto z = hn::Mul(hn::Sub(access.load(x + i), mean), rstd);
    if constexpr (kSums) {
      access.store(hn::MulAdd(v, z, access.load(by.dweight + i)), by.dweight + i);
      access.store(hn::Add(v, access.load(by.dbias + i)), by.dbias + i);
    }
    auto g = v;
    if constexpr (kWeighted) g = hn::Mul(v, access.load(by.weight + i));
    access.store(hn::Mul(hn::NegMulAdd(z, b, hn::Sub(g, a)), rstd), dx + i);
  });
}
template <class T>
HWY_INLINE void norm_backward(const T* dy, const T* x, const NormBackward<T>& by, T* dx, int64_t n) {
  if (by.dweight) {
    by.weight ? norm_backward_by<true, true>(dy, x, by, dx, n) : norm_backward_by<false, true>(dy, x, by, dx, n);
  } else {
    by.weight ? norm_backward_by<true, false>(dy, x, by, dx, n) : norm_backward_by<false, false>(dy, x, by, dx, n);
  }
}

template <class T>
HWY_INLINE void column_sums(const T* dy, const T* x, const T* mean, const T* rstd, T* sum, T* sum_z, int64_t n) {
  for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
    const auto v = a.load(dy + i);
    const auto z = hn::Mul(hn::Sub(a.load(x + i), a.load(mean + i)), a.load(rstd + i));
    a.store(hn::Add(v, a.load(sum + i)), sum + i);
    a.store(hn::MulAdd(v, z, a.load(sum_z + i)), sum_z + i);
  });
}

template <template <class> class F, class T>
HWY_INLINE void linear_backward_by(const T* dy, const T* x, const LinearBackward<T>& by, T* dx, int64_t n) {
  const F<T> mean(by.mean), p(by.p), q(by.q), r(by.r);
  for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
    const auto centered = hn::Sub(a.load(x + i), mean.at(a, i));
    a.store(hn::MulAdd(a.load(dy + i), p.at(a, i), hn::MulAdd(centered, q.at(a, i), r.at(a, i))), dx + i);
  });
}
template <class T>
HWY_INLINE void linear_backward(const T* dy, const T* x, const LinearBackward<T>& by, T* dx, int64_t n) {
  by.mean.values ? linear_backward_by<Numbers>(dy, x, by, dx, n) : linear_backward_by<Number>(dy, x, by, dx, n);
}

template <class T>
HWY_INLINE void column_squares(const T* x, const T* mean, T* sum, int64_t n) {
  for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
    const auto centered = hn::Sub(a.load(x + i), a.load(mean + i));
    a.store(hn::MulAdd(centered, centered, a.load(sum + i)), sum + i);
  });
}

template <template <class> class F, class T>
HWY_INLINE void exp_affine_by(const T* x, const ExpAffine<T>& by, T* y, int64_t n) {
  const F<T> shift(by.shift), scale(by.scale), offset(by.offset);
  for_vectors<T>(n, [&](auto a, int64_t i) HWY_ATTR {
    a.store(hn::MulAdd(vexp(hn::Sub(a.load(x + i), shift.at(a, i))), scale.at(a, i), offset.at(a, i)), y + i);
  });
}
template <class T>
HWY_INLINE void exp_affine(const T* x, const ExpAffine<T>& by, T* y, int64_t n) {
  by.shift.values ? exp_affine_by<Numbers>(x, by, y, n) : exp_affine_by<Number>(x, by, y, n);
}

// What is dispatched, per type: functions cannot be overloaded there.
#define CHORALE_ROW_LOOPS(T, suffix)                                                                              \
  void standardize_##suffix(const T* x, const Standardize<T>& by, T* y, int64_t n) { standardize(x, by, y, n); }  \
  NormSums<T> sums_##suffix(const T* dy, const T* x, const T* weight, T mean, T rstd, int64_t n) {                \
    return sums(dy, x, weight, mean, rstd, n);                                                                    \
  }                                                                                                               \
  void norm_backward_##suffix(const T* dy, const T* x, const NormBackward<T>& by, T* dx, int64_t n) {             \
    norm_backward(dy, x, by, dx, n);                                                                              \
  }                                                                                                               \
  void column_sums_##suffix(const T* dy, const T* x, const T* mean, const T* rstd, T* sum, T* sum_z, int64_t n) { \
    column_sums(dy, x, mean, rstd, sum, sum_z, n);                                                                \
  }                                                                                                               \
  void linear_backward_##suffix(const T* dy, const T* x, const LinearBackward<T>& by, T* dx, int64_t n) {         \
    linear_backward(dy, x, by, dx, n);                                                                            \
  }                                                                                                               \
  void column_squares_##suffix(const T* x, const T* mean, T* sum, int64_t n) { column_squares(x, mean, sum, n); } \
  void exp_affine_##suffix(const T* x, const ExpAffine<T>& by, T* y, int64_t n) { exp_affine(x, by, y, n); }
CHORALE_ROW_LOOPS(float, f32)
CHORALE_ROW_LOOPS(double, f64)
#undef CHORALE_ROW_LOOPS

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {

#define CHORALE_ROW_LOOPS(T, suffix)                                                                         \
  HWY_EXPORT(standardize_##suffix);                                                                          \
  HWY_EXPORT(sums_##suffix);                                                                                 \
  HWY_EXPORT(norm_backward_##suffix);                                                                        \
  HWY_EXPORT(column_sums_##suffix);                                                                          \
  HWY_EXPORT(linear_backward_##suffix);                                                                      \
  HWY_EXPORT(column_squares_##suffix);                                                                       \
  HWY_EXPORT(exp_affine_##suffix);                                                                           \
  void standardize_row(const T* x, const Standardize<T>& by, T* y, int64_t n) {                              \
    HWY_DYNAMIC_DISPATCH(standardize_##suffix)(x, by, y, n);                                                 \
  }                                                                                                          \
  NormSums<T> norm_sums(const T* dy, const T* x, const T* weight, T mean, T rstd, int64_t n) {               \
    return HWY_DYNAMIC_DISPATCH(sums_##suffix)(dy, x, weight, mean, rstd, n);                                \
  }                                                                                                          \
  void norm_backward_row(const T* dy, const T* x, const NormBackward<T>& by, T* dx, int64_t n) {             \
    HWY_DYNAMIC_DISPATCH(norm_backward_##suffix)(dy, x, by, dx, n);                                          \
  }                                                                                                          \
  void add_column_sums(const T* dy, const T* x, const T* mean, const T* rstd, T* sum, T* sum_z, int64_t n) { \
    HWY_DYNAMIC_DISPATCH(column_sums_##suffix)(dy, x, mean, rstd, sum, sum_z, n);                            \
  }                                                                                                          \
  void linear_backward_row(const T* dy, const T* x, const LinearBackward<T>& by, T* dx, int64_t n) {         \
    HWY_DYNAMIC_DISPATCH(linear_backward_##suffix)(dy, x, by, dx, n);                                        \
  }                                                                                                          \
  void add_column_squares(const T* x, const T* mean, T* sum, int64_t n) {                                    \
    HWY_DYNAMIC_DISPATCH(column_squares_##suffix)(x, mean, sum, n);                                          \
  }                                                                                                          \
  void exp_affine_row(const T* x, const ExpAffine<T>& by, T* y, int64_t n) {                                 \
    HWY_DYNAMIC_DISPATCH(exp_affine_##suffix)(x, by, y, n);                                                  \
  }
CHORALE_ROW_LOOPS(float, f32)
CHORALE_ROW_LOOPS(double, f64)
#undef CHORALE_ROW_LOOPS

}  // namespace chorale::kernel::cpu
#endif
