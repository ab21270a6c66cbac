// Vectors of f32 or f64 from and to memory of f32, f64, f16 or bf16. Read once per target.
#if defined(CHORALE_VEC_STORAGE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_STORAGE_INL_H_
#undef CHORALE_VEC_STORAGE_INL_H_
#else
#define CHORALE_VEC_STORAGE_INL_H_
#endif

#include <type_traits>

#include "hwy/highway.h"

#include "chorale/vec/lanes-inl.h"
#include "chorale/vec/scalar_reduce.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- the 16-bit types

// Rounds to even; NaN keeps its top bits and becomes quiet.
template <class D32>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D32>> to_bits16(bfloat16, D32, hn::Vec<D32> x) {
  const hn::RebindToUnsigned<D32> du;
  const auto bits = hn::BitCast(du, x);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
  const auto quiet = hn::Or(upper, hn::Set(du, 0x40));
  return hn::TruncateTo(hn::Rebind<uint16_t, D32>(), hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded));
}
template <class D32>
HWY_INLINE hn::Vec<D32> from_bits16(bfloat16, D32 d, hn::Vec<hn::Rebind<uint16_t, D32>> bits) {
  const hn::RebindToUnsigned<D32> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}
#if HWY_TARGET <= HWY_AVX2
template <class D32>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D32>> to_bits16(float16, D32, hn::Vec<D32> x) {
  return hn::BitCast(hn::Rebind<uint16_t, D32>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D32>(), x));
}
template <class D32>
HWY_INLINE hn::Vec<D32> from_bits16(float16, D32 d, hn::Vec<hn::Rebind<uint16_t, D32>> bits) {
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D32>(), bits));
}
#else
// No instruction, and Highway's emulation knows neither infinities nor NaN: lane by lane, out of line to save code.
template <class D32>
HWY_NOINLINE hn::Vec<hn::Rebind<uint16_t, D32>> to_bits16(float16, D32 d, hn::Vec<D32> x) {
  HWY_ALIGN float lanes[hn::MaxLanes(D32())];
  HWY_ALIGN uint16_t bits[hn::MaxLanes(D32())];
  hn::Store(x, d, lanes);
  for (size_t i = 0; i < hn::MaxLanes(d); ++i) bits[i] = float16(lanes[i]).bits;
  return hn::Load(hn::Rebind<uint16_t, D32>(), bits);
}
template <class D32>
HWY_NOINLINE hn::Vec<D32> from_bits16(float16, D32 d, hn::Vec<hn::Rebind<uint16_t, D32>> bits) {
  HWY_ALIGN float lanes[hn::MaxLanes(D32())];
  HWY_ALIGN uint16_t halves[hn::MaxLanes(D32())];
  hn::Store(bits, hn::Rebind<uint16_t, D32>(), halves);
  for (size_t i = 0; i < hn::MaxLanes(d); ++i) {
    float16 half;
    half.bits = halves[i];
    lanes[i] = static_cast<float>(half);
  }
  return hn::Load(d, lanes);
}
#endif

// ---- memory of T, computed with in f32 or f64

template <class T>
struct Storage {
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using D = hn::ScalableTag<Compute>;
  using V = hn::Vec<D>;
  static constexpr size_t kLanes = hn::MaxLanes(D());

  static HWY_INLINE V load(const T* from) {
    if constexpr (kIsHalf<T>) {
      return from_bits16(T(), D(), hn::LoadU(D16(), reinterpret_cast<const uint16_t*>(from)));
    } else {
      return hn::LoadU(D(), from);
    }
  }
  // The first `count` elements, zeros behind them.
  static HWY_INLINE V load_first(const T* from, size_t count) {
    if constexpr (kIsHalf<T>) {
      return from_bits16(T(), D(), load_n(D16(), reinterpret_cast<const uint16_t*>(from), count));
    } else {
      return load_n(D(), from, count);
    }
  }
  static HWY_INLINE void store(V v, T* to) {
    if constexpr (kIsHalf<T>) {
      hn::StoreU(to_bits16(T(), D(), v), D16(), reinterpret_cast<uint16_t*>(to));
    } else {
      hn::StoreU(v, D(), to);
    }
  }
  static HWY_INLINE void store_first(V v, T* to, size_t count) {
    if constexpr (kIsHalf<T>) {
      store_n(to_bits16(T(), D(), v), D16(), reinterpret_cast<uint16_t*>(to), count);
    } else {
      store_n(v, D(), to, count);
    }
  }

 private:
  using D16 = hn::Rebind<uint16_t, D>;
};

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
