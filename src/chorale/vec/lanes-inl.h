// Loads and stores that Highway lacks: parts of a vector, and masks as bytes 0 and 1. Read once per target.
#if defined(CHORALE_VEC_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_LANES_INL_H_
#undef CHORALE_VEC_LANES_INL_H_
#else
#define CHORALE_VEC_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Before a loop: iterations are independent even where the compiler cannot see it (a result may be one of the inputs).
#undef CHORALE_IVDEP
#if HWY_COMPILER_CLANG
#define CHORALE_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define CHORALE_IVDEP _Pragma("GCC ivdep")
#endif

// Masked accesses that the CPU has are safe at the end of a page; Highway emulates the others with whole vectors. AVX2
// has masked stores too, but on AMD's CPUs they are slower than a detour through the stack.
template <class T>
inline constexpr bool kHasMaskedLoad = HWY_TARGET <= HWY_AVX3 || (HWY_TARGET == HWY_AVX2 && sizeof(T) >= 4);
template <class T>
inline constexpr bool kHasMaskedStore = HWY_TARGET <= HWY_AVX3;

// Copies count < 2 * kPiece elements, kPiece being a power of two: a move for each bit of the count.
template <size_t kPiece, class T>
HWY_INLINE void copy_pieces(const T* from, T* to, size_t count) {
  if ((count & kPiece) != 0) {
    __builtin_memcpy(to, from, kPiece * sizeof(T));
    from += kPiece;
    to += kPiece;
  }
  if constexpr (kPiece > 1) copy_pieces<kPiece / 2>(from, to, count);
}
template <size_t kMax, class T>
HWY_INLINE void copy_few(const T* from, T* to, size_t count) {
  if (count >= kMax) {
    __builtin_memcpy(to, from, kMax * sizeof(T));
  } else {
    copy_pieces<kMax / 2>(from, to, count);
  }
}

// The first `count` lanes from memory, zeros behind them; count may be anything up to the number of lanes.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_n(D d, const T* from, size_t count) {
  if constexpr (kHasMaskedLoad<T>) {
    return hn::MaskedLoad(hn::FirstN(d, count), d, from);
  } else {
    HWY_ALIGN T lanes[hn::MaxLanes(D())] = {};
    copy_few<hn::MaxLanes(D())>(from, lanes, count);
    return hn::Load(d, lanes);
  }
}
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void store_n(hn::Vec<D> v, D d, T* to, size_t count) {
  if constexpr (kHasMaskedStore<T>) {
    hn::BlendedStore(v, hn::FirstN(d, count), d, to);
  } else {
    HWY_ALIGN T lanes[hn::MaxLanes(D())];
    hn::Store(v, d, lanes);
    copy_few<hn::MaxLanes(D())>(lanes, to, count);
  }
}

// ---- masks of d as bytes: as many as d has lanes.

template <class D>
using BytesOf = hn::Rebind<uint8_t, D>;

template <class D>
HWY_INLINE hn::Vec<BytesOf<D>> bytes_from_mask(D d, hn::Mask<D> mask) {
  const hn::RebindToUnsigned<D> du;
  const auto lanes = hn::BitCast(du, hn::VecFromMask(d, mask));
  return hn::And(hn::TruncateTo(BytesOf<D>(), lanes), hn::Set(BytesOf<D>(), 1));
}
template <class D>
HWY_INLINE hn::Mask<D> mask_from_byte_vector(D d, hn::Vec<BytesOf<D>> bytes) {
  const hn::Rebind<uint32_t, D> d32;
  const auto wide = hn::PromoteTo(d32, bytes);
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::RebindMask(d, hn::Ne(wide, hn::Zero(d32)));
  } else {
    const hn::RebindToUnsigned<D> d64;
    return hn::RebindMask(d, hn::Ne(hn::PromoteTo(d64, wide), hn::Zero(d64)));
  }
}

template <class D>
HWY_INLINE hn::Mask<D> mask_from_bytes(D d, const uint8_t* from) {
  return mask_from_byte_vector(d, hn::LoadU(BytesOf<D>(), from));
}
template <class D>
HWY_INLINE hn::Mask<D> mask_from_bytes_n(D d, const uint8_t* from, size_t count) {
  return mask_from_byte_vector(d, load_n(BytesOf<D>(), from, count));
}
template <class D>
HWY_INLINE void store_mask(hn::Mask<D> mask, D d, uint8_t* to) {
  hn::StoreU(bytes_from_mask(d, mask), BytesOf<D>(), to);
}
template <class D>
HWY_INLINE void store_mask_n(hn::Mask<D> mask, D d, uint8_t* to, size_t count) {
  store_n(bytes_from_mask(d, mask), BytesOf<D>(), to, count);
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
