// Elementary functions of Highway vectors, one implementation per lane type. f32: polynomials in registers wherever
// training spends time (exp, log, tanh, erf, …), within 2 ulp with FMA; expm1, log1p and tanh within 0.75, because they
// carry what rounding took away; SLEEF where range reduction is the hard part. f64: SLEEF.
//
// No include guard in the usual sense: read once per target.
#if defined(CHORALE_VEC_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_MATH_INL_H_
#undef CHORALE_VEC_MATH_INL_H_
#else
#define CHORALE_VEC_MATH_INL_H_
#endif

#include <cmath>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::Vec<hn::ScalableTag<float>>;
using F64 = hn::Vec<hn::ScalableTag<double>>;

template <class V>
HWY_INLINE V constant(double value) {
  const hn::DFromV<V> d;
  return hn::Set(d, static_cast<hn::TFromD<decltype(d)>>(value));
}

// SLEEF names its functions after the instruction set; sleef.h declares those that the whole file may use, hence this
// list.
#if HWY_TARGET == HWY_AVX3
#define CHORALE_SLEEF_NAME(name, accuracy, f32_or_f64) CHORALE_SLEEF_##f32_or_f64(name, f16, d8, accuracy##avx512f)
using RawF32 = __m512;
using RawF64 = __m512d;
#elif HWY_TARGET == HWY_AVX2
#define CHORALE_SLEEF_NAME(name, accuracy, f32_or_f64) CHORALE_SLEEF_##f32_or_f64(name, f8, d4, accuracy##avx2)
using RawF32 = __m256;
using RawF64 = __m256d;
#else
#define CHORALE_SLEEF_NAME(name, accuracy, f32_or_f64) CHORALE_SLEEF_##f32_or_f64(name, f4, d2, accuracy##sse4)
using RawF32 = __m128;
using RawF64 = __m128d;
#endif
#define CHORALE_SLEEF_F32(name, f, d, suffix) Sleef_##name##f##_##suffix
#define CHORALE_SLEEF_F64(name, f, d, suffix) Sleef_##name##d##_##suffix
#define CHORALE_SLEEF_UNARY(name)                                                               \
  extern "C" __attribute__((const)) RawF32 CHORALE_SLEEF_NAME(name, u10, F32)(RawF32);          \
  extern "C" __attribute__((const)) RawF64 CHORALE_SLEEF_NAME(name, u10, F64)(RawF64);          \
  HWY_INLINE F32 sleef_##name(F32 x) { return F32{CHORALE_SLEEF_NAME(name, u10, F32)(x.raw)}; } \
  HWY_INLINE F64 sleef_##name(F64 x) { return F64{CHORALE_SLEEF_NAME(name, u10, F64)(x.raw)}; }
#define CHORALE_SLEEF_BINARY(name, accuracy)                                                                       \
  extern "C" __attribute__((const)) RawF32 CHORALE_SLEEF_NAME(name, accuracy, F32)(RawF32, RawF32);                \
  extern "C" __attribute__((const)) RawF64 CHORALE_SLEEF_NAME(name, accuracy, F64)(RawF64, RawF64);                \
  HWY_INLINE F32 sleef_##name(F32 a, F32 b) { return F32{CHORALE_SLEEF_NAME(name, accuracy, F32)(a.raw, b.raw)}; } \
  HWY_INLINE F64 sleef_##name(F64 a, F64 b) { return F64{CHORALE_SLEEF_NAME(name, accuracy, F64)(a.raw, b.raw)}; }

CHORALE_SLEEF_UNARY(exp)
CHORALE_SLEEF_UNARY(exp2)
CHORALE_SLEEF_UNARY(expm1)
CHORALE_SLEEF_UNARY(log)
CHORALE_SLEEF_UNARY(log2)
CHORALE_SLEEF_UNARY(log10)
CHORALE_SLEEF_UNARY(log1p)
CHORALE_SLEEF_UNARY(sin)
CHORALE_SLEEF_UNARY(cos)
CHORALE_SLEEF_UNARY(tan)
CHORALE_SLEEF_UNARY(tanh)
CHORALE_SLEEF_UNARY(erf)
CHORALE_SLEEF_BINARY(pow, u10)
CHORALE_SLEEF_BINARY(fmod, )

#undef CHORALE_SLEEF_UNARY
#undef CHORALE_SLEEF_BINARY
#undef CHORALE_SLEEF_NAME
#undef CHORALE_SLEEF_F32
#undef CHORALE_SLEEF_F64

// A polynomial by Horner's rule, highest coefficient first.
template <class V, class... Rest>
HWY_INLINE V horner(V x, V value, float next, Rest... rest) {
  value = hn::MulAdd(value, x, constant<V>(static_cast<double>(next)));
  if constexpr (sizeof...(rest) == 0) {
    return value;
  } else {
    return horner(x, value, rest...);
  }
}
template <class... Rest>
HWY_INLINE F32 polynomial(F32 x, float first, Rest... rest) {
  return horner(x, constant<F32>(static_cast<double>(first)), rest...);
}

// p * 2^n for integral n in [-252, 254], with overflow and gradual underflow.
HWY_INLINE F32 scale_by_power_of_two(F32 p, F32 n) {
#if HWY_TARGET == HWY_AVX3
  return F32{_mm512_scalef_ps(p.raw, n.raw)};
#else
  // Multiplies in two steps, since the factor itself may leave the range of normal numbers.
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<int32_t> di;
  const auto i = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(i);
  const auto bias = hn::Set(di, 127);
  const F32 first = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const F32 second = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(i, half), bias)));
  return hn::Mul(hn::Mul(p, first), second);
#endif
}

// x = n ln 2 + r with |r| <= ln 2 / 2.
struct Reduced {
  F32 n, r;
};
HWY_INLINE Reduced reduce_by_ln2(F32 x) {
  const F32 n = hn::Round(hn::Mul(x, constant<F32>(1.44269504)));
  // ln 2 in two parts: n times the first is exact.
  const F32 r = hn::NegMulAdd(n, constant<F32>(0x1.62e400p-1), x);
  return {n, hn::NegMulAdd(n, constant<F32>(0x1.7f7d1cp-20), r)};
}
// exp(r) for |r| <= ln 2 / 2.
HWY_INLINE F32 exp_of_reduced(F32 r) {
  return polynomial(r, 0x1.694000p-10f, 0x1.125edcp-7f, 0x1.555b5ap-5f, 0x1.555450p-3f, 0x1.fffff6p-2f, 1.0f, 1.0f);
}
// x86's min and max return their second argument if either is NaN, so x must come second.
HWY_INLINE F32 limit(F32 x, float low, float high) {
  return hn::Max(constant<F32>(static_cast<double>(low)), hn::Min(constant<F32>(static_cast<double>(high)), x));
}

HWY_INLINE F32 vexp(F32 x) {
  const auto [n, r] = reduce_by_ln2(limit(x, -104.0f, 89.0f));  // the limits give 0 and inf
  return scale_by_power_of_two(exp_of_reduced(r), n);
}
HWY_INLINE F64 vexp(F64 x) { return sleef_exp(x); }

HWY_INLINE F32 vexp2(F32 x) {
  x = limit(x, -151.0f, 129.0f);
  const F32 n = hn::Round(x);
  return scale_by_power_of_two(exp_of_reduced(hn::Mul(hn::Sub(x, n), constant<F32>(0.693147180559945))), n);
}
HWY_INLINE F64 vexp2(F64 x) { return sleef_exp2(x); }

// A number as the sum of two: what an f32 holds of it, and what rounding took away.
struct Parts {
  F32 high, low;
};
// a + b for |a| >= |b|, or a = 0.
HWY_INLINE Parts exact_sum(F32 a, F32 b) {
  const F32 high = hn::Add(a, b);
  return {high, hn::Sub(b, hn::Sub(high, a))};
}
// exp(x) - 1, or half of it where kHalf says so, since 2^n may overflow where the result does not. `low` is up to 0.04
// of `high`.
template <bool kHalf>
HWY_INLINE Parts exp_minus_one(F32 x) {
  const F32 n = hn::Round(hn::Mul(x, constant<F32>(1.44269504)));
  // reduce_by_ln2(), with the rest of r.
  const F32 first = hn::NegMulAdd(n, constant<F32>(0x1.62e400p-1), x);
  const F32 r = hn::NegMulAdd(n, constant<F32>(0x1.7f7d1cp-20), first);
  const F32 r_low = hn::NegMulAdd(n, constant<F32>(0x1.7f7d1cp-20), hn::Sub(first, r));
  // exp(r) - 1 = r + r^2 / 2 + r^3 (…).
  const F32 s = hn::Mul(r, r), half = constant<F32>(0.5);
  const Parts p = exact_sum(r, hn::Mul(s, half));
  const F32 cubic = polynomial(r, 0x1.9fbd9cp-13f, 0x1.6d419ep-10f, 0x1.1111ccp-7f, 0x1.5554f2p-5f, 0x1.555554p-3f);
  F32 low = hn::MulAdd(hn::Mul(s, r), cubic, hn::Add(p.low, r_low));
  low = hn::MulAdd(hn::MulSub(r, r, s), half, low);
  // 2^n (that) + 2^n - 1.
  const F32 one = kHalf ? half : constant<F32>(1);
  const F32 scale = scale_by_power_of_two(one, n);
  const F32 less_one = hn::Sub(scale, one);
  const Parts sum = exact_sum(less_one, hn::Mul(scale, p.high));
  F32 rest = sum.low;
  // Beyond 2^24 rounding takes a part of the 1; who asks for the whole does not see it.
  if constexpr (kHalf) rest = hn::Add(rest, hn::Sub(hn::Sub(scale, less_one), one));
  return {sum.high, hn::MulAdd(scale, low, rest)};
}

HWY_INLINE F32 vexpm1(F32 x) {
  const Parts half = exp_minus_one<true>(limit(x, -25.0f, 89.0f));
  const F32 y = hn::Add(half.high, half.low);
  // Keeps the sign of zero, and what half of would be lost.
  return hn::IfThenElse(hn::Lt(hn::Abs(x), constant<F32>(0x1p-25)), x, hn::Add(y, y));
}
HWY_INLINE F64 vexpm1(F64 x) { return sleef_expm1(x); }

HWY_INLINE F32 vlog(F32 x) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<int32_t> di;
  const auto denormal = hn::Lt(x, constant<F32>(0x1p-126));
  const F32 scaled = hn::IfThenElse(denormal, hn::Mul(x, constant<F32>(0x1p23)), x);
  // x = 2^e m with m in [2/3, 4/3]; e is kept in the exponent's place.
  const auto bits = hn::BitCast(di, scaled);
  const auto e = hn::And(hn::Sub(bits, hn::BitCast(di, constant<F32>(0.666666667))), hn::Set(di, -0x800000));
  const F32 exponent =
      hn::MulAdd(hn::ConvertTo(d, e), constant<F32>(0x1p-23), hn::IfThenElseZero(denormal, constant<F32>(-23)));
  const F32 f = hn::Sub(hn::BitCast(d, hn::Sub(bits, e)), constant<F32>(1));
  const F32 s = hn::Mul(f, f);
  // log(1 + f); the first four coefficients are evaluated side by side.
  const F32 high = hn::MulAdd(constant<F32>(-0x1.0ae000p-3), f, constant<F32>(0x1.208000p-3));
  const F32 low = hn::MulAdd(constant<F32>(-0x1.f198b2p-4), f, constant<F32>(0x1.1e5740p-3));
  F32 p = horner(f, hn::MulAdd(high, s, low), -0x1.55b36cp-3f, 0x1.99d8b2p-3f, -0x1.fffe02p-3f, 0x1.5554fap-2f, -0.5f);
  p = hn::MulAdd(p, s, f);
  p = hn::MulAdd(exponent, constant<F32>(0x1.62e430p-1), p);
  // 0 gives -inf, a negative number NaN, +inf and NaN themselves.
  const F32 infinity = constant<F32>(std::numeric_limits<double>::infinity());
  p = hn::IfThenElse(hn::Lt(x, infinity), p, x);
  p = hn::IfThenElse(hn::Eq(x, constant<F32>(0)), hn::Neg(infinity), p);
  return hn::IfThenElse(hn::Lt(x, constant<F32>(0)), hn::NaN(d), p);
}
HWY_INLINE F64 vlog(F64 x) { return sleef_log(x); }

HWY_INLINE F32 vlog1p(F32 x) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<int32_t> di;
  // log(u) for u = 1 + x as rounded, and a first-order term for what rounding took away.
  const F32 one = constant<F32>(1), half = constant<F32>(0.5);
  const F32 u = hn::Add(one, x);
  const F32 lost = hn::Sub(x, hn::Sub(u, one));
  // u = 2^e m with m in [2/3, 4/3], as in vlog().
  const auto bits = hn::BitCast(di, u);
  const auto e = hn::And(hn::Sub(bits, hn::BitCast(di, constant<F32>(0.666666667))), hn::Set(di, -0x800000));
  const F32 exponent = hn::Mul(hn::ConvertTo(d, e), constant<F32>(0x1p-23));
  // log(1 + f) = f - f^2 / 2 + f^3 (…).
  const F32 f = hn::Sub(hn::BitCast(d, hn::Sub(bits, e)), one), s = hn::Mul(f, f);
  const F32 high = hn::MulAdd(constant<F32>(-0x1.08054ap-3), f, constant<F32>(0x1.1e6710p-3));
  const F32 low = hn::MulAdd(constant<F32>(-0x1.f31158p-4), f, constant<F32>(0x1.1ed706p-3));
  const F32 cubic =
      horner(f, hn::MulAdd(high, s, low), -0x1.559dcap-3f, 0x1.99d02ap-3f, -0x1.fffef0p-3f, 0x1.555506p-2f);
  const Parts p = exact_sum(f, hn::Mul(s, constant<F32>(-0.5)));
  const Parts sum = exact_sum(hn::Mul(exponent, constant<F32>(0x1.62e400p-1)), p.high);
  F32 rest = hn::MulAdd(hn::Mul(f, s), cubic, hn::Add(sum.low, p.low));
  rest = hn::NegMulAdd(hn::MulSub(f, f, s), half, rest);
  rest = hn::MulAdd(exponent, constant<F32>(0x1.7f7d1cp-20), rest);
  F32 y = hn::Add(sum.high, hn::Add(rest, hn::Div(lost, u)));
  // 0, +inf and NaN give themselves, -1 gives -inf, what is below gives NaN.
  const F32 zero = constant<F32>(0), infinity = constant<F32>(std::numeric_limits<double>::infinity());
  y = hn::IfThenElse(hn::And(hn::Lt(x, infinity), hn::Not(hn::Eq(x, zero))), y, x);
  y = hn::IfThenElse(hn::Eq(u, zero), hn::Neg(infinity), y);
  return hn::IfThenElse(hn::Lt(u, zero), hn::NaN(d), y);
}
HWY_INLINE F64 vlog1p(F64 x) {
  // SLEEF gives inf near the end of the range.
  const auto huge = hn::Gt(x, constant<F64>(0x1p1000));
  const F64 y = sleef_log1p(hn::IfThenElse(huge, hn::Mul(x, constant<F64>(0x1p-512)), x));
  return hn::IfThenElse(huge, hn::Add(y, constant<F64>(512 * 0.693147180559945309417)), y);  // -0 stays -0
}

// C's fmod, exact. SLEEF gives NaN where the quotient leaves the range of the type: those lanes are computed one by
// one.
template <class V>
HWY_INLINE V vfmod(V a, V b) {
  const hn::DFromV<V> d;
  using T = hn::TFromD<decltype(d)>;
  V mod = sleef_fmod(a, b);
  const auto wrong =
      hn::And(hn::IsNaN(mod), hn::And(hn::IsFinite(a), hn::And(hn::Not(hn::IsNaN(b)), hn::Ne(b, hn::Zero(d)))));
  if (HWY_UNLIKELY(!hn::AllFalse(d, wrong))) {
    constexpr size_t kLanes = hn::MaxLanes(d);
    HWY_ALIGN T as[kLanes], bs[kLanes];
    hn::Store(a, d, as);
    hn::Store(b, d, bs);
    for (size_t i = 0; i < kLanes; ++i) as[i] = std::fmod(as[i], bs[i]);
    mod = hn::IfThenElse(wrong, hn::Load(d, as), mod);
  }
  return mod;
}

HWY_INLINE F32 vtanh(F32 x) {
  const F32 t = hn::Abs(x), two = constant<F32>(2);
  // e / (e + 2) with e = exp(2 t) - 1; beyond 9.1 this is 1.
  const Parts unequal = exp_minus_one<false>(hn::Min(constant<F32>(18.2), hn::Add(t, t)));
  const Parts e = exact_sum(unequal.high, unequal.low);
  // What rounding takes from the divisor is exact where it matters: below 2^25 the 2 is a multiple of its last place.
  const F32 divisor = hn::Add(two, e.high);
  const F32 divisor_low = hn::Add(hn::Sub(e.high, hn::Sub(divisor, two)), e.low);
  const F32 inverse = hn::Div(constant<F32>(1), divisor);
  const F32 y = hn::Mul(e.high, inverse);
  const F32 rest = hn::Add(hn::NegMulAdd(y, divisor, e.high), hn::NegMulAdd(y, divisor_low, e.low));
  return hn::CopySign(hn::MulAdd(rest, inverse, y), x);
}
HWY_INLINE F64 vtanh(F64 x) { return sleef_tanh(x); }

HWY_INLINE F32 verf(F32 x) {
  const F32 t = hn::Abs(x);
  const F32 s = hn::Mul(x, x);
  // 1 - exp(q(t)) for large t; beyond 4 this is 1.
  const F32 limited = hn::Min(constant<F32>(4), t);
  const F32 limited_square = hn::Mul(limited, limited);
  const F32 q_high = hn::MulAdd(constant<F32>(-0x1.220000p-16), limited, constant<F32>(0x1.91cfb2p-12));
  const F32 q_low = hn::MulAdd(constant<F32>(-0x1.fd1438p-9), limited, constant<F32>(0x1.8d6342p-6));
  F32 q = horner(limited, hn::MulAdd(q_high, limited_square, q_low), -0x1.b55cb8p-4f, -0x1.450aa0p-1f, -0x1.079d0cp-3f);
  q = hn::MulSub(q, limited, limited);
  const auto [n, r] = reduce_by_ln2(q);
  const F32 large = hn::Sub(constant<F32>(1), scale_by_power_of_two(exp_of_reduced(r), n));
  const F32 p =
      polynomial(s, -0x1.38e000p-11f, 0x1.471a58p-8f, -0x1.b691b2p-6f, 0x1.ce1c44p-4f, -0x1.812700p-2f, 0x1.06eba8p-3f);
  const F32 small = hn::MulAdd(p, t, t);
  return hn::CopySign(hn::IfThenElse(hn::Gt(t, constant<F32>(0.927734375)), large, small), x);
}
HWY_INLINE F64 verf(F64 x) { return sleef_erf(x); }

// The share of the normal distribution below x, within 1e-7: what gelu needs, at half of the cost of erf. Even and odd
// coefficients are summed apart, since a processor waits for the longest chain here: in one sum each took a fifth more.
HWY_INLINE F32 vnormal_cdf(F32 x) {
  // The tail beyond a = |x| is 2^(r(a) - x^2 log2(e) / 2 - 1); r varies slowly, and beyond 5.09 nobody sees it.
  const F32 a = hn::Min(constant<F32>(5.091168824543142), hn::Abs(x));
  const F32 a2 = hn::Mul(a, a);
  const F32 r_even = polynomial(a2, 0x1.9a5886p-16f, -0x1.25027ap-12f, -0x1.aed25ap-5f, -0x1.26aef8p+0f);
  const F32 r_odd = polynomial(a2, -0x1.981c36p-20f, -0x1.fa0960p-14f, 0x1.d98e7ep-8f, 0x1.0c74b8p-2f);
  const F32 r = hn::Mul(a, hn::MulAdd(r_odd, a, r_even));
  F32 exponent = hn::NegMulAdd(hn::Mul(x, x), constant<F32>(0.721347520444481704), r);
#if HWY_TARGET == HWY_AVX3
  const F32 fraction{_mm512_reduce_ps(exponent.raw, _MM_FROUND_TO_NEAREST_INT)};
  const F32 n = hn::Sub(exponent, fraction);
#else
  exponent = hn::Max(constant<F32>(-150), exponent);
  const F32 n = hn::Round(exponent);
  const F32 fraction = hn::Sub(exponent, n);
#endif
  // 2^(fraction - 1)
  const F32 square = hn::Mul(fraction, fraction);
  const F32 even = polynomial(square, 0x1.3d0c52p-8f, 0x1.ebf918p-4f, 0x1.000002p-1f);
  const F32 odd = polynomial(square, 0x1.5c08dcp-11f, 0x1.c6b6e6p-6f, 0x1.62e428p-2f);
  const F32 tail = scale_by_power_of_two(hn::MulAdd(odd, fraction, even), n);
  return hn::IfThenElse(hn::Lt(x, constant<F32>(0)), tail, hn::Sub(constant<F32>(1), tail));
}
HWY_INLINE F64 vnormal_cdf(F64 x) {
  const F64 e = sleef_erf(hn::Mul(x, constant<F64>(0.70710678118654752440)));
  return hn::MulAdd(e, constant<F64>(0.5), constant<F64>(0.5));
}

// gelu(x) for an x that came from bf16, within 2^-12, plus half of bf16's last place: the upper 16 bits are the result,
// rounded (a tie upwards, which is below the error). NaN and infinities have no lower bits, so they stay what they are.
// The result is x or 0, less t times the tail of the normal distribution beyond t = |x|, 2^(q(t) - x^2 log2(e) / 2).
// Beyond 5.1 t and q stand still, and their errors cancel to 4 %, at 1e-7 and less.
HWY_INLINE F32 gelu_of_bf16(F32 x) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<int32_t> di;
  const F32 t = hn::Min(constant<F32>(5.1), hn::Abs(x));
  const F32 q = polynomial(t, -0x1.12e330p-12f, 0x1.55726ep-8f, -0x1.78ad12p-5f, 0x1.04022cp-2f, -0x1.25c338p+0f,
                           -0x1.001078p+0f);
  F32 exponent = hn::NegMulAdd(hn::Mul(x, x), constant<F32>(0.721347520444481704), q);
#if HWY_TARGET == HWY_AVX3
  const F32 n = exponent;  // the instruction that scales rounds it down by itself
  const F32 fraction{_mm512_reduce_ps(exponent.raw, _MM_FROUND_TO_NEG_INF)};
#else
  exponent = hn::Max(constant<F32>(-150), exponent);
  const F32 n = hn::Floor(exponent);
  const F32 fraction = hn::Sub(exponent, n);
#endif
  const F32 power = polynomial(fraction, 0x1.3f9696p-4f, 0x1.cefc62p-3f, 0x1.644448p-1f, 0x1.fff634p-1f);
  const F32 y = hn::NegMulAdd(t, scale_by_power_of_two(power, n), hn::Max(constant<F32>(-0.0), x));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, y), hn::Set(di, 0x8000)));
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
