// Loops over contiguous memory by the vector, the last one perhaps in part. Read once per target.
#if defined(CHORALE_KERNEL_CPU_FOR_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_KERNEL_CPU_FOR_VECTORS_INL_H_
#undef CHORALE_KERNEL_CPU_FOR_VECTORS_INL_H_
#else
#define CHORALE_KERNEL_CPU_FOR_VECTORS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "chorale/vec/lanes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Reads and writes whole vectors, or the first `count` lanes of one; lanes behind them are read as 0.
template <class T>
struct Whole {
  hn::ScalableTag<T> d;
  using V = hn::Vec<hn::ScalableTag<T>>;
  HWY_INLINE V load(const T* from) const { return hn::LoadU(d, from); }
  HWY_INLINE void store(V v, T* to) const { hn::StoreU(v, d, to); }
};
template <class T>
struct Part {
  hn::ScalableTag<T> d;
  size_t count;
  using V = hn::Vec<hn::ScalableTag<T>>;
  HWY_INLINE V load(const T* from) const { return chorale::vec::HWY_NAMESPACE::load_n(d, from, count); }
  HWY_INLINE void store(V v, T* to) const { chorale::vec::HWY_NAMESPACE::store_n(v, d, to, count); }
};

// f(access, i) for vectors that cover [0, n).
template <class T, class F>
HWY_INLINE void for_vectors(int64_t n, F&& f) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(Whole<T>{}, i);
  if (i < n) f(Part<T>{{}, static_cast<size_t>(n - i)}, i);
}

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
