// The 16-bit floating types as vectors of f32. Read once per target.
#if defined(CHORALE_VEC_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_HALF_INL_H_
#undef CHORALE_VEC_HALF_INL_H_
#else
#define CHORALE_VEC_HALF_INL_H_
#endif

#include "chorale/base/half.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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
template <class D32>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D32>> to_bits16(float16, D32 d, hn::Vec<D32> x) {
  const hn::Rebind<uint16_t, D32> d16;
#if HWY_TARGET <= HWY_AVX2
  static_cast<void>(d);
  return hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D32>(), x));
#else
  // Highway's emulation knows neither infinities nor NaN.
  HWY_ALIGN float lanes[hn::MaxLanes(D32())];
  HWY_ALIGN uint16_t bits[hn::MaxLanes(D32())];
  hn::Store(x, d, lanes);
  for (size_t i = 0; i < hn::MaxLanes(d); ++i) bits[i] = float16(lanes[i]).bits;
  return hn::Load(d16, bits);
#endif
}
template <class D32>
HWY_INLINE hn::Vec<D32> from_bits16(float16, D32 d, hn::Vec<hn::Rebind<uint16_t, D32>> bits) {
#if HWY_TARGET <= HWY_AVX2
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D32>(), bits));
#else
  HWY_ALIGN float lanes[hn::MaxLanes(D32())];
  HWY_ALIGN uint16_t halves[hn::MaxLanes(D32())];
  hn::Store(bits, hn::Rebind<uint16_t, D32>(), halves);
  for (size_t i = 0; i < hn::MaxLanes(d); ++i) {
    float16 half;
    half.bits = halves[i];
    lanes[i] = static_cast<float>(half);
  }
  return hn::Load(d, lanes);
#endif
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
