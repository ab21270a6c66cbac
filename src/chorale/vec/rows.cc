// Softmax and normalisation of one row: a few passes, each at the speed of the cache the row lies in.
#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <cmath>

#include "chorale/vec/kernels.h"
#include "chorale/vec/math-inl.h"
#include "chorale/vec/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using VectorOfT = hn::Vec<hn::ScalableTag<T>>;
using Sum = VectorReduce<ReduceOp::kSum>;
using Max = VectorReduce<ReduceOp::kMax>;

template <class T, class Body>
HWY_INLINE T sum_of(int64_t n, const Body& body) {
  return combine_lanes<Sum>(reduce_vectors<Sum, VectorOfT<T>>(static_cast<size_t>(n), body));
}
template <class T>
HWY_INLINE T max_of(const T* in, int64_t n) {
  return combine_lanes<Max>(reduce_vectors<Max, VectorOfT<T>>(static_cast<size_t>(n), RowBody<Max, T>{in}));
}

// out[i] = map(i), where map.at(d, i, load) gets its inputs through load(pointer).
template <class T, class Map>
HWY_INLINE void transform(T* out, int64_t length, const Map& map) {
  const hn::ScalableTag<T> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  const auto n = static_cast<size_t>(length);
  size_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const auto a = map.at(i, kLanes), b = map.at(i + kLanes, kLanes);
    hn::StoreU(a, d, out + i);
    hn::StoreU(b, d, out + i + kLanes);
  }
  for (; i < n; i += kLanes) {
    const size_t count = n - i < kLanes ? n - i : kLanes;
    store_n(map.at(i, count), d, out + i, count);
  }
}
// All lanes, or the first few: the whole ones are plain loads once `count` is a constant.
template <class T>
HWY_INLINE VectorOfT<T> load_count(const T* from, size_t count) {
  const hn::ScalableTag<T> d;
  return count == hn::MaxLanes(d) ? hn::LoadU(d, from) : load_n(d, from, count);
}

// ---- softmax

// sum of exp(x - shift), and the terms themselves if `out` is given.
template <class T, bool kStores>
struct ExpBody {
  using V = VectorOfT<T>;
  const T* in;
  T* out;
  V shift;

  HWY_INLINE V step(V s, size_t i) const {
    const hn::ScalableTag<T> d;
    const V e = vexp(hn::Sub(hn::LoadU(d, in + i), shift));
    if constexpr (kStores) hn::StoreU(e, d, out + i);
    return hn::Add(s, e);
  }
  HWY_INLINE V last(V s, size_t i, size_t count) const {
    const hn::ScalableTag<T> d;
    const V e = vexp(hn::Sub(load_n(d, in + i, count), shift));
    if constexpr (kStores) store_n(e, d, out + i, count);
    return hn::Add(s, hn::IfThenElseZero(hn::FirstN(d, count), e));
  }
};

template <class T, bool kStores>
HWY_INLINE T sum_exp(const T* in, T* out, int64_t n, T shift) {
  return sum_of<T>(n, ExpBody<T, kStores>{in, out, hn::Set(hn::ScalableTag<T>(), shift)});
}

template <class T>
MaxSumExp<T> max_sum_exp(const T* in, int64_t n) {
  const T largest = max_of(in, n);
  const T shift = std::isinf(largest) ? T(0) : largest;
  return {shift, sum_exp<T, false>(in, nullptr, n, shift)};
}

template <class T>
struct Scaled {
  const T* in;
  VectorOfT<T> factor;
  HWY_INLINE VectorOfT<T> at(size_t i, size_t count) const { return hn::Mul(load_count(in + i, count), factor); }
};
template <class T>
void softmax(const T* in, T* out, int64_t n) {
  const T sum = sum_exp<T, true>(in, out, n, max_of(in, n));
  transform(out, n, Scaled<T>{out, hn::Set(hn::ScalableTag<T>(), 1 / sum)});
}

template <class T>
struct Shifted {
  const T* in;
  VectorOfT<T> largest, log_sum;
  HWY_INLINE VectorOfT<T> at(size_t i, size_t count) const {
    return hn::Sub(hn::Sub(load_count(in + i, count), largest), log_sum);
  }
};
template <class T>
void log_softmax(const T* in, T* out, int64_t n) {
  const hn::ScalableTag<T> d;
  const T largest = max_of(in, n);
  const T log_sum = std::log(sum_exp<T, false>(in, nullptr, n, largest));
  transform(out, n, Shifted<T>{in, hn::Set(d, largest), hn::Set(d, log_sum)});
}

template <class T>
struct ProductBody {
  using V = VectorOfT<T>;
  const T* a;
  const T* b;
  HWY_INLINE V step(V s, size_t i) const {
    const hn::ScalableTag<T> d;
    return hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s);
  }
  HWY_INLINE V last(V s, size_t i, size_t count) const {
    const hn::ScalableTag<T> d;
    return hn::MulAdd(load_n(d, a + i, count), load_n(d, b + i, count), s);
  }
};
template <class T>
struct SoftmaxGradient {
  const T* dy;
  const T* y;
  VectorOfT<T> sum;
  HWY_INLINE VectorOfT<T> at(size_t i, size_t count) const {
    return hn::Mul(load_count(y + i, count), hn::Sub(load_count(dy + i, count), sum));
  }
};
template <class T>
void softmax_backward(const T* dy, const T* y, T* dx, int64_t n) {
  const T sum = sum_of<T>(n, ProductBody<T>{dy, y});
  transform(dx, n, SoftmaxGradient<T>{dy, y, hn::Set(hn::ScalableTag<T>(), sum)});
}

template <class T>
struct LogSoftmaxGradient {
  const T* dy;
  const T* y;
  VectorOfT<T> sum;
  HWY_INLINE VectorOfT<T> at(size_t i, size_t count) const {
    return hn::NegMulAdd(vexp(load_count(y + i, count)), sum, load_count(dy + i, count));
  }
};
template <class T>
void log_softmax_backward(const T* dy, const T* y, T* dx, int64_t n) {
  const T sum = sum_of<T>(n, RowBody<Sum, T>{dy});
  transform(dx, n, LogSoftmaxGradient<T>{dy, y, hn::Set(hn::ScalableTag<T>(), sum)});
}

// ---- normalisation

template <class T>
struct SquaredDeviationBody {
  using V = VectorOfT<T>;
  const T* in;
  V mean;
  HWY_INLINE V step(V s, size_t i) const {
    const V difference = hn::Sub(hn::LoadU(hn::ScalableTag<T>(), in + i), mean);
    return hn::MulAdd(difference, difference, s);
  }
  HWY_INLINE V last(V s, size_t i, size_t count) const {
    const hn::ScalableTag<T> d;
    const V difference = hn::IfThenElseZero(hn::FirstN(d, count), hn::Sub(load_n(d, in + i, count), mean));
    return hn::MulAdd(difference, difference, s);
  }
};
template <class T>
Moments<T> moments(const T* in, int64_t n) {
  const T mean = sum_of<T>(n, RowBody<Sum, T>{in}) / static_cast<T>(n);
  const T squares = sum_of<T>(n, SquaredDeviationBody<T>{in, hn::Set(hn::ScalableTag<T>(), mean)});
  return {mean, squares / static_cast<T>(n)};
}

template <class T, bool kHasWeight, bool kHasBias>
struct Normalized {
  const T* in;
  VectorOfT<T> mean, rstd;
  const T* weight;
  const T* bias;
  HWY_INLINE VectorOfT<T> at(size_t i, size_t count) const {
    VectorOfT<T> y = hn::Mul(hn::Sub(load_count(in + i, count), mean), rstd);
    if constexpr (kHasWeight && kHasBias)
      return hn::MulAdd(y, load_count(weight + i, count), load_count(bias + i, count));
    if constexpr (kHasWeight) y = hn::Mul(y, load_count(weight + i, count));
    if constexpr (kHasBias) y = hn::Add(y, load_count(bias + i, count));
    return y;
  }
};
template <class T>
void normalize(const T* in, T mean, T rstd, const T* weight, const T* bias, T* out, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto m = hn::Set(d, mean), r = hn::Set(d, rstd);
  if (weight != nullptr && bias != nullptr) {
    transform(out, n, Normalized<T, true, true>{in, m, r, weight, bias});
  } else if (weight != nullptr) {
    transform(out, n, Normalized<T, true, false>{in, m, r, weight, bias});
  } else if (bias != nullptr) {
    transform(out, n, Normalized<T, false, true>{in, m, r, weight, bias});
  } else {
    transform(out, n, Normalized<T, false, false>{in, m, r, weight, bias});
  }
}

template <class T>
RowKernels<T> row_kernels() {
  return {&max_sum_exp<T>,          &softmax<T>, &log_softmax<T>, &softmax_backward<T>,
          &log_softmax_backward<T>, &moments<T>, &normalize<T>};
}

void add_rows(Kernels& kernels) {
  kernels.rows_f32 = row_kernels<float>();
  kernels.rows_f64 = row_kernels<double>();
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_rows);
void add_rows(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_rows)(kernels); }

#define CHORALE_ROWS(T, rows)                                                                          \
  MaxSumExp<T> max_sum_exp(const T* in, int64_t n) { return kernels().rows.max_sum_exp(in, n); }       \
  void softmax_row(const T* in, T* out, int64_t n) { kernels().rows.softmax(in, out, n); }             \
  void log_softmax_row(const T* in, T* out, int64_t n) { kernels().rows.log_softmax(in, out, n); }     \
  void softmax_backward_row(const T* dy, const T* y, T* dx, int64_t n) {                               \
    kernels().rows.softmax_backward(dy, y, dx, n);                                                     \
  }                                                                                                    \
  void log_softmax_backward_row(const T* dy, const T* y, T* dx, int64_t n) {                           \
    kernels().rows.log_softmax_backward(dy, y, dx, n);                                                 \
  }                                                                                                    \
  Moments<T> moments(const T* in, int64_t n) { return kernels().rows.moments(in, n); }                 \
  void normalize_row(const T* in, T mean, T rstd, const T* weight, const T* bias, T* out, int64_t n) { \
    kernels().rows.normalize(in, mean, rstd, weight, bias, out, n);                                    \
  }
CHORALE_ROWS(float, rows_f32)
CHORALE_ROWS(double, rows_f64)
#undef CHORALE_ROWS
}  // namespace chorale::vec
#endif
