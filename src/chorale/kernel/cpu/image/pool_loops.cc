#include "chorale/kernel/cpu/image/pool_loops.h"

#include <algorithm>
#include <limits>

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/image/pool_loops.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/kernel/cpu/support/for_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {

using chorale::vec::HWY_NAMESPACE::load_n;
using chorale::vec::HWY_NAMESPACE::store_n;

// Signed integers as wide as T: indices in the lanes of values.
template <class T>
using IndexTag = hn::RebindToSigned<hn::ScalableTag<T>>;

// The first `count` indices, as i64.
template <class T>
HWY_INLINE void store_indices(hn::Vec<IndexTag<T>> indices, int64_t* to, int64_t count) {
  if constexpr (sizeof(T) == 8) {
    store_n(indices, IndexTag<T>(), to, static_cast<size_t>(count));
  } else {
    const hn::ScalableTag<int64_t> wide;
    const hn::Half<IndexTag<T>> half;
    const auto lanes = static_cast<int64_t>(hn::Lanes(wide)), first = std::min(lanes, count);
    store_n(hn::PromoteTo(wide, hn::LowerHalf(half, indices)), wide, to, static_cast<size_t>(first));
    if (count <= lanes) return;
    store_n(hn::PromoteTo(wide, hn::UpperHalf(half, indices)), wide, to + lanes, static_cast<size_t>(count - first));
  }
}

// The largest so far, and where it was.
template <class T>
struct Best {
  hn::Vec<hn::ScalableTag<T>> value;
  hn::Vec<IndexTag<T>> index;

  HWY_INLINE void offer(hn::Vec<hn::ScalableTag<T>> candidate, hn::Vec<IndexTag<T>> at) {
    const auto better = hn::Or(hn::Gt(candidate, value), hn::IsNaN(candidate));
    value = hn::IfThenElse(better, candidate, value);
    index = hn::IfThenElse(hn::RebindMask(IndexTag<T>(), better), at, index);
  }
};

// Loads as many of the `left` elements as a vector holds; none if `left` is not positive.
template <class T>
HWY_INLINE hn::Vec<hn::ScalableTag<T>> load_left(const T* from, int64_t left) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (HWY_LIKELY(left >= lanes)) return hn::LoadU(d, from);
  return left > 0 ? load_n(d, from, static_cast<size_t>(left)) : hn::Zero(d);
}

// Calls take(values, row, k) for every element k of each row of the windows j …; values has a lane per window, of which
// those beyond the last window are garbage. A stride of 2 reads pairs, whose second elements serve the next k.
template <int64_t kStride, class T, class F>
HWY_INLINE void for_elements(const PoolRow<T>& r, int64_t j, F&& take) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t h = r.rows.begin; h < r.rows.end; h += r.rows.step) {
    const T* row = r.plane + h * r.width;
    for (int64_t k = 0; k < r.kernel; ++k) {
      const int64_t w = r.first + j * kStride + k * r.dilation;
      const auto low = load_left(row + w, r.width - w);
      if constexpr (kStride == 1) {
        take(low, h, k);
      } else {
        const auto high = load_left(row + w + lanes, r.width - w - lanes);
        take(hn::ConcatEven(d, high, low), h, k);
        if (r.dilation == 1 && k + 1 < r.kernel) take(hn::ConcatOdd(d, high, low), h, ++k);
      }
    }
  }
}

template <int64_t kStride, class T>
HWY_INLINE void max_rows(const PoolRow<T>& r, T* y, int64_t* indices) {
  const hn::ScalableTag<T> d;
  const IndexTag<T> di;
  using I = hn::TFromD<IndexTag<T>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto steps = hn::Mul(hn::Iota(di, 0), hn::Set(di, static_cast<I>(kStride)));
  for_vectors<T>(r.count, [&](auto a, int64_t j) HWY_ATTR {
    const auto index_of = [&](int64_t h, int64_t k) HWY_ATTR {
      return hn::Add(steps, hn::Set(di, static_cast<I>(h * r.width + r.first + j * kStride + k * r.dilation)));
    };
    Best<T> best{hn::Set(d, -std::numeric_limits<T>::infinity()), index_of(r.rows.begin, 0)};
    for_elements<kStride>(r, j, [&](auto v, int64_t h, int64_t k) HWY_ATTR { best.offer(v, index_of(h, k)); });
    a.store(best.value, y + j);
    store_indices<T>(best.index, indices + j, std::min(lanes, r.count - j));
  });
}

template <int64_t kStride, class T>
HWY_INLINE void avg_rows(const PoolRow<T>& r, T scale, T* y) {
  const hn::ScalableTag<T> d;
  for_vectors<T>(r.count, [&](auto a, int64_t j) HWY_ATTR {
    auto sum = hn::Zero(d);
    for_elements<kStride>(r, j, [&](auto v, int64_t, int64_t) HWY_ATTR { sum = hn::Add(sum, v); });
    a.store(hn::Mul(sum, hn::Set(d, scale)), y + j);
  });
}

template <class T>
HWY_INLINE void max_place(const PoolPlace<T>& p, T* y, int64_t* indices) {
  const hn::ScalableTag<T> d;
  const IndexTag<T> di;
  using I = hn::TFromD<IndexTag<T>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for_vectors<T>(p.channels, [&](auto a, int64_t c) HWY_ATTR {
    Best<T> best{hn::Set(d, -std::numeric_limits<T>::infinity()),
                 hn::Set(di, static_cast<I>(p.rows.begin * p.width + p.columns.begin))};
    for (int64_t h = p.rows.begin; h < p.rows.end; h += p.rows.step) {
      for (int64_t w = p.columns.begin; w < p.columns.end; w += p.columns.step) {
        const int64_t at = h * p.width + w;
        best.offer(a.load(p.image + at * p.channels + c), hn::Set(di, static_cast<I>(at)));
      }
    }
    a.store(best.value, y + c);
    store_indices<T>(best.index, indices + c, std::min(lanes, p.channels - c));
  });
}

template <class T>
HWY_INLINE void avg_place(const PoolPlace<T>& p, T scale, T* y) {
  const hn::ScalableTag<T> d;
  for_vectors<T>(p.channels, [&](auto a, int64_t c) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (int64_t h = p.rows.begin; h < p.rows.end; h += p.rows.step) {
      for (int64_t w = p.columns.begin; w < p.columns.end; w += p.columns.step) {
        sum = hn::Add(sum, a.load(p.image + (h * p.width + w) * p.channels + c));
      }
    }
    a.store(hn::Mul(sum, hn::Set(d, scale)), y + c);
  });
}

#define CHORALE_POOL_LOOPS(T, suffix)                                                                          \
  void max_row_##suffix(const PoolRow<T>& row, T* y, int64_t* indices) {                                       \
    row.stride == 1 ? max_rows<1>(row, y, indices) : max_rows<2>(row, y, indices);                             \
  }                                                                                                            \
  void avg_row_##suffix(const PoolRow<T>& row, T scale, T* y) {                                                \
    row.stride == 1 ? avg_rows<1>(row, scale, y) : avg_rows<2>(row, scale, y);                                 \
  }                                                                                                            \
  void max_place_##suffix(const PoolPlace<T>& place, T* y, int64_t* indices) { max_place(place, y, indices); } \
  void avg_place_##suffix(const PoolPlace<T>& place, T scale, T* y) { avg_place(place, scale, y); }
CHORALE_POOL_LOOPS(float, f32)
CHORALE_POOL_LOOPS(double, f64)
#undef CHORALE_POOL_LOOPS

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {

#define CHORALE_POOL_LOOPS(T, suffix)                                                                                \
  HWY_EXPORT(max_row_##suffix);                                                                                      \
  HWY_EXPORT(avg_row_##suffix);                                                                                      \
  HWY_EXPORT(max_place_##suffix);                                                                                    \
  HWY_EXPORT(avg_place_##suffix);                                                                                    \
  void max_pool_row(const PoolRow<T>& row, T* y, int64_t* indices) {                                                 \
    HWY_DYNAMIC_DISPATCH(max_row_##suffix)(row, y, indices);                                                         \
  }                                                                                                                  \
  void avg_pool_row(const PoolRow<T>& row, T scale, T* y) { HWY_DYNAMIC_DISPATCH(avg_row_##suffix)(row, scale, y); } \
  void max_pool_place(const PoolPlace<T>& place, T* y, int64_t* indices) {                                           \
    HWY_DYNAMIC_DISPATCH(max_place_##suffix)(place, y, indices);                                                     \
  }                                                                                                                  \
  void avg_pool_place(const PoolPlace<T>& place, T scale, T* y) {                                                    \
    HWY_DYNAMIC_DISPATCH(avg_place_##suffix)(place, scale, y);                                                       \
  }
CHORALE_POOL_LOOPS(float, f32)
CHORALE_POOL_LOOPS(double, f64)
#undef CHORALE_POOL_LOOPS

}  // namespace chorale::kernel::cpu
#endif
