// The vocabulary of scalar_ops.inc for Highway vectors of f32 and f64. A literal may stand wherever a vector may; truth
// values are masks. Read once per target.
#if defined(CHORALE_VEC_VOCABULARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_VOCABULARY_INL_H_
#undef CHORALE_VEC_VOCABULARY_INL_H_
#else
#define CHORALE_VEC_VOCABULARY_INL_H_
#endif

#include <concepts>
#include <type_traits>

#include "hwy/highway.h"

#include "chorale/vec/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class V>
concept Vector = std::same_as<V, F32> || std::same_as<V, F64>;

// The vector type among two arguments, of which one may be a literal.
template <class A, class B>
using VectorOf = std::conditional_t<std::is_arithmetic_v<A>, B, A>;

template <Vector V>
HWY_INLINE V lift(V x) {
  return x;
}
template <Vector V>
HWY_INLINE V lift(double x) {
  return constant<V>(x);
}

#define CHORALE_UNARY(name, expression) \
  template <Vector V>                   \
  HWY_INLINE V name(V x) {              \
    return expression;                  \
  }
CHORALE_UNARY(neg, hn::Neg(x))
CHORALE_UNARY(abs, hn::Abs(x))
CHORALE_UNARY(sqrt, hn::Sqrt(x))
CHORALE_UNARY(floor, hn::Floor(x))
CHORALE_UNARY(ceil, hn::Ceil(x))
CHORALE_UNARY(round, hn::Round(x))
CHORALE_UNARY(trunc, hn::Trunc(x))
CHORALE_UNARY(exp, vexp(x))
CHORALE_UNARY(exp2, vexp2(x))
CHORALE_UNARY(expm1, vexpm1(x))
CHORALE_UNARY(log, vlog(x))
CHORALE_UNARY(log2, sleef_log2(x))
CHORALE_UNARY(log10, sleef_log10(x))
CHORALE_UNARY(log1p, vlog1p(x))
CHORALE_UNARY(sin, sleef_sin(x))
CHORALE_UNARY(cos, sleef_cos(x))
CHORALE_UNARY(tan, sleef_tan(x))
CHORALE_UNARY(tanh, vtanh(x))
CHORALE_UNARY(erf, verf(x))
CHORALE_UNARY(normal_cdf, vnormal_cdf(x))
CHORALE_UNARY(sigmoid, hn::Div(lift<V>(1), hn::Add(lift<V>(1), vexp(hn::Neg(x)))))
CHORALE_UNARY(sign,
              hn::IfThenElse(hn::Gt(x, lift<V>(0)), lift<V>(1), hn::IfThenElseZero(hn::Lt(x, lift<V>(0)), lift<V>(-1))))
CHORALE_UNARY(angle, hn::IfThenElse(hn::IsNaN(x), x,
                                    hn::IfThenElseZero(hn::Lt(x, lift<V>(0)), lift<V>(3.14159265358979323846))))
#undef CHORALE_UNARY

#define CHORALE_BINARY(name, expression)                 \
  template <class A, class B, Vector V = VectorOf<A, B>> \
  HWY_INLINE auto name(A a_, B b_) {                     \
    const V a = lift<V>(a_), b = lift<V>(b_);            \
    return expression;                                   \
  }
CHORALE_BINARY(add, hn::Add(a, b))
CHORALE_BINARY(sub, hn::Sub(a, b))
CHORALE_BINARY(mul, hn::Mul(a, b))
CHORALE_BINARY(div, hn::Div(a, b))
// NaN wins: x86's min and max return their second argument if either is NaN.
CHORALE_BINARY(min, hn::IfThenElse(hn::IsNaN(a), a, hn::Min(a, b)))
CHORALE_BINARY(max, hn::IfThenElse(hn::IsNaN(a), a, hn::Max(a, b)))
CHORALE_BINARY(copysign, hn::CopySign(a, b))
CHORALE_BINARY(pow, sleef_pow(a, b))
CHORALE_BINARY(eq, hn::Eq(a, b))
CHORALE_BINARY(ne, hn::Not(hn::Eq(a, b)))  // NaN differs from everything; hn::Ne says no
CHORALE_BINARY(lt, hn::Lt(a, b))
CHORALE_BINARY(le, hn::Le(a, b))
CHORALE_BINARY(gt, hn::Gt(a, b))
CHORALE_BINARY(ge, hn::Ge(a, b))
#undef CHORALE_BINARY

template <class A, class B, class C, Vector V = VectorOf<VectorOf<A, B>, C>>
HWY_INLINE V fma(A a, B b, C c) {
  return hn::MulAdd(lift<V>(a), lift<V>(b), lift<V>(c));
}

template <class M, class A, class B, Vector V = VectorOf<A, B>>
HWY_INLINE V select(M mask, A a, B b) {
  return hn::IfThenElse(mask, lift<V>(a), lift<V>(b));
}
template <class M>
HWY_INLINE M and_(M a, M b) {
  return hn::And(a, b);
}
template <class M>
HWY_INLINE M or_(M a, M b) {
  return hn::Or(a, b);
}
template <class M>
HWY_INLINE M xor_(M a, M b) {
  return hn::Xor(a, b);
}
template <Vector V>
HWY_INLINE auto isnan(V x) {
  return hn::IsNaN(x);
}
template <Vector V>
HWY_INLINE auto isinf(V x) {
  return hn::IsInf(x);
}
template <Vector V>
HWY_INLINE auto isfinite(V x) {
  return hn::IsFinite(x);
}

template <Vector V>
HWY_INLINE V trunc_divide(V a, V b) {
  return hn::Trunc(hn::Div(a, b));
}
// The sign of the divisor, as Python's %.
template <Vector V>
HWY_INLINE V remainder(V a, V b) {
  const V mod = vfmod(a, b);
  const V zero = lift<V>(0);
  const auto wrong_sign = hn::And(hn::Ne(mod, zero), hn::Xor(hn::Lt(b, zero), hn::Lt(mod, zero)));
  return hn::IfThenElse(wrong_sign, hn::Add(mod, b), mod);
}
// floor(a / b) of the exact quotient: (a - mod) / b is integral but for rounding, and one too large where a remainder
// is left whose sign is not that of b.
template <Vector V>
HWY_INLINE V floor_divide(V a, V b) {
  const V zero = lift<V>(0);
  const V quotient = hn::Div(a, b);
  const V mod = vfmod(a, b);
  const auto wrong_sign = hn::And(hn::Ne(mod, zero), hn::Xor(hn::Lt(b, zero), hn::Lt(mod, zero)));
  const V rounded = hn::Round(hn::Div(hn::Sub(a, mod), b));
  const V integral = hn::IfThenElse(wrong_sign, hn::Sub(rounded, lift<V>(1)), rounded);
  const V result = hn::IfThenElse(hn::Eq(integral, zero), hn::CopySign(zero, quotient), integral);
  return hn::IfThenElse(hn::Eq(b, zero), quotient, result);
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
