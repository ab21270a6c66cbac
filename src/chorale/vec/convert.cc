// Conversions between all dtypes. Few pairs are elementary loops; the others go through one of them in pieces that stay
// in the first-level cache: i64 -> f32 -> bf16, f64 -> i32 -> i8, c64 -> f32 -> anything.
#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/vec/convert.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <complex>
#include <type_traits>

#include "chorale/vec/kernels.h"
#include "chorale/vec/scalar_reduce.h"
#include "chorale/vec/storage-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- arrays of f32 to and from the 16-bit types

template <class Half>
void half_to_float(const Half* in, float* out, size_t n) {
  using S = Storage<Half>;
  size_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
    const auto a = S::load(in + i), b = S::load(in + i + S::kLanes);
    Storage<float>::store(a, out + i);
    Storage<float>::store(b, out + i + S::kLanes);
  }
  for (; i < n; i += S::kLanes) {
    const size_t count = n - i < S::kLanes ? n - i : S::kLanes;
    Storage<float>::store_first(S::load_first(in + i, count), out + i, count);
  }
}

template <class Half>
void float_to_half(const float* in, Half* out, size_t n) {
  using S = Storage<Half>;
  size_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
    const auto a = Storage<float>::load(in + i), b = Storage<float>::load(in + i + S::kLanes);
    S::store(a, out + i);
    S::store(b, out + i + S::kLanes);
  }
  for (; i < n; i += S::kLanes) {
    const size_t count = n - i < S::kLanes ? n - i : S::kLanes;
    S::store_first(Storage<float>::load_first(in + i, count), out + i, count);
  }
}

// ---- floating to integer: the CPU's truncating conversion, whose result is defined for every input (the smallest
// integer where the value does not fit), unlike the language's.

HWY_INLINE int32_t truncated_i32(float x) { return _mm_cvttss_si32(_mm_set_ss(x)); }
HWY_INLINE int32_t truncated_i32(double x) { return _mm_cvttsd_si32(_mm_set_sd(x)); }
HWY_INLINE int64_t truncated_i64(float x) { return _mm_cvttss_si64(_mm_set_ss(x)); }
HWY_INLINE int64_t truncated_i64(double x) { return _mm_cvttsd_si64(_mm_set_sd(x)); }

// Whole vectors; returns how many elements that was.
HWY_INLINE size_t truncate_vectors(const float* in, int32_t* out, size_t n) {
  const hn::ScalableTag<int32_t> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto x = hn::LoadU(hn::ScalableTag<float>(), in + i);
#if HWY_TARGET == HWY_AVX3
    const hn::Vec<decltype(d)> y{_mm512_cvttps_epi32(x.raw)};
#elif HWY_TARGET == HWY_AVX2
    const hn::Vec<decltype(d)> y{_mm256_cvttps_epi32(x.raw)};
#else
    const hn::Vec<decltype(d)> y{_mm_cvttps_epi32(x.raw)};
#endif
    hn::StoreU(y, d, out + i);
  }
  return i;
}
HWY_INLINE size_t truncate_vectors(const double* in, int32_t* out, size_t n) {
  size_t i = 0;
#if HWY_TARGET == HWY_AVX3
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvttpd_epi32(_mm512_loadu_pd(in + i)));
  }
#else
  for (; i + 2 <= n; i += 2) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_cvttpd_epi32(_mm_loadu_pd(in + i)));
  }
#endif
  return i;
}
template <class F>
HWY_INLINE size_t truncate_vectors([[maybe_unused]] const F* in, [[maybe_unused]] int64_t* out,
                                   [[maybe_unused]] size_t n) {
  size_t i = 0;
#if HWY_TARGET == HWY_AVX3
  for (; i + 8 <= n; i += 8) {
    if constexpr (sizeof(F) == 4) {
      _mm512_storeu_si512(out + i, _mm512_cvttps_epi64(_mm256_loadu_ps(in + i)));
    } else {
      _mm512_storeu_si512(out + i, _mm512_cvttpd_epi64(_mm512_loadu_pd(in + i)));
    }
  }
#endif
  return i;
}
template <class F, class I>
void truncate(const F* in, I* out, size_t n) {
  for (size_t i = truncate_vectors(in, out, n); i < n; ++i) {
    if constexpr (sizeof(I) == 4) {
      out[i] = truncated_i32(in[i]);
    } else {
      out[i] = truncated_i64(in[i]);
    }
  }
}

// ---- all pairs

template <class From, class To>
void convert(const Stored<From>* in, Stored<To>* out, size_t n);

// Converts in pieces, through Middle.
template <class From, class Middle, class To>
HWY_INLINE void convert_through(const Stored<From>* in, Stored<To>* out, size_t n) {
  constexpr size_t kPiece = 512;
  alignas(64) Stored<Middle> piece[kPiece];
  for (size_t i = 0; i < n; i += kPiece) {
    const size_t count = n - i < kPiece ? n - i : kPiece;
    convert<From, Middle>(in + i, piece, count);
    convert<Middle, To>(piece, out + i, count);
  }
}

template <class From, class To>
void convert(const Stored<From>* in, Stored<To>* out, size_t n) {
  if constexpr (std::is_same_v<To, bool>) {
    CHORALE_IVDEP
    for (size_t i = 0; i < n; ++i) out[i] = is_nonzero(in[i]) ? 1 : 0;
  } else if constexpr (std::is_same_v<From, To>) {
    if (n > 0) __builtin_memmove(out, in, n * sizeof(To));
  } else if constexpr (kIsHalf<From> && std::is_same_v<To, float>) {
    half_to_float(in, out, n);
  } else if constexpr (std::is_same_v<From, float> && kIsHalf<To>) {
    float_to_half(in, out, n);
  } else if constexpr (kIsHalf<From> || kIsHalf<To>) {
    convert_through<From, float, To>(in, out, n);
  } else if constexpr (kIsComplex<From> && kIsComplex<To>) {
    using FromReal = typename From::value_type;
    using ToReal = typename To::value_type;
    convert<FromReal, ToReal>(reinterpret_cast<const FromReal*>(in), reinterpret_cast<ToReal*>(out), 2 * n);
  } else if constexpr (kIsComplex<From>) {
    using Real = typename From::value_type;
    if constexpr (std::is_same_v<To, Real>) {
      CHORALE_IVDEP
      for (size_t i = 0; i < n; ++i) out[i] = reinterpret_cast<const Real*>(in)[2 * i];
    } else {
      convert_through<From, Real, To>(in, out, n);
    }
  } else if constexpr (kIsComplex<To>) {
    using Real = typename To::value_type;
    if constexpr (std::is_same_v<From, Real>) {
      for (size_t i = 0; i < n; ++i) out[i] = To(in[i], 0);
    } else {
      convert_through<From, Real, To>(in, out, n);
    }
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    if constexpr (sizeof(To) >= 4) {
      truncate(in, out, n);
    } else {
      convert_through<From, int32_t, To>(in, out, n);
    }
  } else {
    CHORALE_IVDEP
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<To>(in[i]);
  }
}

template <class From, class To>
void convert_entry(const void* in, void* out, int64_t n) {
  convert<From, To>(static_cast<const Stored<From>*>(in), static_cast<Stored<To>*>(out), static_cast<size_t>(n));
}

template <class From>
void add_from(Kernels& kernels) {
#define CHORALE_ADD_TO(To, name) \
  kernels.convert[static_cast<size_t>(dtype_of<From>)][static_cast<size_t>(DType::name)] = &convert_entry<From, To>;
  CHORALE_FOR_EACH_DTYPE(CHORALE_ADD_TO)
#undef CHORALE_ADD_TO
}

void add_convert(Kernels& kernels) {
#define CHORALE_ADD_FROM(From, name) add_from<From>(kernels);
  CHORALE_FOR_EACH_DTYPE(CHORALE_ADD_FROM)
#undef CHORALE_ADD_FROM
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::vec {
HWY_EXPORT(add_convert);
void add_convert(Kernels& kernels) { HWY_DYNAMIC_DISPATCH(add_convert)(kernels); }
}  // namespace chorale::vec
#endif
