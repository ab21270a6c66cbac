// The vocabulary of scalar_ops.inc for one element: integers, bool and complex numbers. The compiler turns loops over
// them into vector code by itself, where that is possible. Read once per target.
#if defined(CHORALE_VEC_SCALAR_VOCABULARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_SCALAR_VOCABULARY_INL_H_
#undef CHORALE_VEC_SCALAR_VOCABULARY_INL_H_
#else
#define CHORALE_VEC_SCALAR_VOCABULARY_INL_H_
#endif

#include <cmath>
#include <complex>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"

#include "chorale/vec/scalar_reduce.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {

// One element. A type of its own, so that literals can be told from elements.
template <class T>
struct One {
  using Type = T;
  Stored<T> value;
};
template <class V>
concept Single = requires {
  typename V::Type;
};
template <class V>
concept Integer = Single<V> && std::integral<typename V::Type> && !std::same_as<typename V::Type, bool>;
template <class V>
concept Truth = Single<V> && std::same_as<typename V::Type, bool>;
template <class V>
concept Complex = Single<V> && kIsComplex<typename V::Type>;

template <class A, class B>
using OneOf = std::conditional_t<std::is_arithmetic_v<A>, B, A>;

template <Single V>
HWY_INLINE V lift(V x) {
  return x;
}
template <Single V>
HWY_INLINE V lift(double x) {
  if constexpr (kIsComplex<typename V::Type>) {
    return V{typename V::Type(static_cast<typename V::Type::value_type>(x))};
  } else {
    return V{static_cast<decltype(V::value)>(x)};
  }
}

// ---- one definition per kind. Integers wrap around; bool adds like or and multiplies like and.

template <Integer V>
HWY_INLINE V wrapped(uint64_t x) {
  return V{static_cast<typename V::Type>(x)};
}
// Sign-extended, so that products and quotients of the narrow types are right modulo theirs.
template <Integer V>
HWY_INLINE uint64_t wide(V x) {
  return static_cast<uint64_t>(x.value);
}
// Smith's method: no overflow where the quotient is representable.
template <class T>
HWY_INLINE std::complex<T> quotient(std::complex<T> a, std::complex<T> b) {
  const T c = b.real(), d = b.imag();
  if (std::abs(c) >= std::abs(d)) {
    if (c == 0 && d == 0) return {a.real() / std::abs(c), a.imag() / std::abs(d)};
    const T ratio = d / c, scale = 1 / (c + rounded_product(d, ratio));
    return {(a.real() + rounded_product(a.imag(), ratio)) * scale,
            (a.imag() - rounded_product(a.real(), ratio)) * scale};
  }
  const T ratio = c / d, scale = 1 / (rounded_product(c, ratio) + d);
  return {(rounded_product(a.real(), ratio) + a.imag()) * scale, (rounded_product(a.imag(), ratio) - a.real()) * scale};
}

#define CHORALE_BINARY(Kind, name, expression)      \
  template <class A, class B, Kind V = OneOf<A, B>> \
  HWY_INLINE auto name(A a_, B b_) {                \
    const V a = lift<V>(a_), b = lift<V>(b_);       \
    return expression;                              \
  }
#define CHORALE_UNARY(Kind, name, expression) \
  template <Kind V>                           \
  HWY_INLINE auto name(V x) {                 \
    return expression;                        \
  }

CHORALE_BINARY(Integer, add, wrapped<V>(wide(a) + wide(b)))
CHORALE_BINARY(Integer, sub, wrapped<V>(wide(a) - wide(b)))
CHORALE_BINARY(Integer, mul, wrapped<V>(wide(a) * wide(b)))
CHORALE_BINARY(Integer, min, b.value < a.value ? b : a)
CHORALE_BINARY(Integer, max, a.value < b.value ? b : a)
CHORALE_BINARY(Integer, bit_and, wrapped<V>(wide(a) & wide(b)))
CHORALE_BINARY(Integer, bit_or, wrapped<V>(wide(a) | wide(b)))
CHORALE_BINARY(Integer, bit_xor, wrapped<V>(wide(a) ^ wide(b)))
CHORALE_UNARY(Integer, bit_not, wrapped<V>(~wide(x)))
CHORALE_UNARY(Integer, neg, wrapped<V>(0 - wide(x)))
CHORALE_UNARY(Integer, abs, x.value < 0 ? neg(x) : x)
CHORALE_UNARY(Integer, sign, wrapped<V>(static_cast<uint64_t>((x.value > 0) - (x.value < 0))))

// Rounded down, the remainder has the divisor's sign. Zero for a zero divisor; -1 is apart because the smallest number
// divided by it overflows.
template <class A, class B, Integer V = OneOf<A, B>>
HWY_INLINE V floor_divide(A a_, B b_) {
  using T = typename V::Type;
  const T a = lift<V>(a_).value, b = lift<V>(b_).value;
  if (b == 0) return V{0};
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return neg(V{a});
  const T down = a % b != 0 && (a < 0) != (b < 0) ? T(1) : T(0);
  return V{static_cast<T>(a / b - down)};
}
template <class A, class B, Integer V = OneOf<A, B>>
HWY_INLINE V trunc_divide(A a_, B b_) {
  using T = typename V::Type;
  const T a = lift<V>(a_).value, b = lift<V>(b_).value;
  if (b == 0) return V{0};
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return neg(V{a});
  return V{static_cast<T>(a / b)};
}
template <class A, class B, Integer V = OneOf<A, B>>
HWY_INLINE V remainder(A a_, B b_) {
  using T = typename V::Type;
  const T a = lift<V>(a_).value, b = lift<V>(b_).value;
  if (b == 0 || (std::is_signed_v<T> && b == static_cast<T>(-1))) return V{0};
  const T rest = static_cast<T>(a % b);
  return V{static_cast<T>(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest)};
}
// Raised by squaring. A negative exponent gives what is left of the real power: 1, -1 or 0.
template <class A, class B, Integer V = OneOf<A, B>>
HWY_INLINE V pow(A a_, B b_) {
  const V base = lift<V>(a_), exponent = lift<V>(b_);
  if (exponent.value < 0) {
    if (base.value == 1) return base;
    return base.value == typename V::Type(-1) ? V{static_cast<typename V::Type>(exponent.value % 2 != 0 ? -1 : 1)}
                                              : V{0};
  }
  uint64_t result = 1, square = wide(base);
  for (uint64_t e = wide(exponent); e != 0; e >>= 1, square *= square) {
    if ((e & 1) != 0) result *= square;
  }
  return wrapped<V>(result);
}

CHORALE_BINARY(Truth, add, (V{static_cast<uint8_t>(a.value | b.value)}))
CHORALE_BINARY(Truth, mul, (V{static_cast<uint8_t>(a.value & b.value)}))
CHORALE_BINARY(Truth, min, (V{static_cast<uint8_t>(a.value & b.value)}))
CHORALE_BINARY(Truth, max, (V{static_cast<uint8_t>(a.value | b.value)}))
CHORALE_BINARY(Truth, bit_and, (V{static_cast<uint8_t>(a.value & b.value)}))
CHORALE_BINARY(Truth, bit_or, (V{static_cast<uint8_t>(a.value | b.value)}))
CHORALE_BINARY(Truth, bit_xor, (V{static_cast<uint8_t>(a.value ^ b.value)}))
CHORALE_UNARY(Truth, bit_not, (V{static_cast<uint8_t>(x.value ^ 1)}))
CHORALE_UNARY(Truth, sign, x)

CHORALE_BINARY(Complex, add, V{a.value + b.value})
CHORALE_BINARY(Complex, sub, V{a.value - b.value})
CHORALE_BINARY(Complex, mul, V{complex_product(a.value, b.value)})
CHORALE_BINARY(Complex, div, V{quotient(a.value, b.value)})
CHORALE_BINARY(Complex, pow, V{std::pow(a.value, b.value)})
CHORALE_UNARY(Complex, neg, V{-x.value})
CHORALE_UNARY(Complex, conj, V{std::conj(x.value)})
CHORALE_UNARY(Complex, sqrt, V{std::sqrt(x.value)})
CHORALE_UNARY(Complex, exp, V{std::exp(x.value)})
CHORALE_UNARY(Complex, log, V{std::log(x.value)})
CHORALE_UNARY(Complex, sin, V{std::sin(x.value)})
CHORALE_UNARY(Complex, cos, V{std::cos(x.value)})
CHORALE_UNARY(Complex, tan, V{std::tan(x.value)})
CHORALE_UNARY(Complex, tanh, V{std::tanh(x.value)})
CHORALE_UNARY(Complex, sigmoid, div(1, add(1, exp(neg(x)))))
CHORALE_UNARY(Complex, real, x.value.real())
CHORALE_UNARY(Complex, imag, x.value.imag())
CHORALE_UNARY(Complex, abs, std::abs(x.value))
CHORALE_UNARY(Complex, angle, std::arg(x.value))
CHORALE_UNARY(Complex, isnan, bool(std::isnan(x.value.real()) | std::isnan(x.value.imag())))
CHORALE_UNARY(Complex, isinf, bool(std::isinf(x.value.real()) | std::isinf(x.value.imag())))
CHORALE_UNARY(Complex, isfinite, bool(std::isfinite(x.value.real()) & std::isfinite(x.value.imag())))
// x / |x|, and 0 for 0.
CHORALE_UNARY(Complex, sign, x.value == decltype(x.value)(0) ? x : V{x.value / std::abs(x.value)})

// ---- for all of them

CHORALE_BINARY(Single, eq, a.value == b.value)
CHORALE_BINARY(Single, ne, a.value != b.value)
CHORALE_BINARY(Single, lt, a.value < b.value)
CHORALE_BINARY(Single, le, a.value <= b.value)
CHORALE_BINARY(Single, gt, a.value > b.value)
CHORALE_BINARY(Single, ge, a.value >= b.value)
#undef CHORALE_BINARY
#undef CHORALE_UNARY

template <class A, class B, class C, Single V = OneOf<OneOf<A, B>, C>>
HWY_INLINE V fma(A a, B b, C c) {
  return add(mul(lift<V>(a), lift<V>(b)), lift<V>(c));
}
template <class A, class B, Single V = OneOf<A, B>>
HWY_INLINE V select(bool condition, A a, B b) {
  return condition ? lift<V>(a) : lift<V>(b);
}
HWY_INLINE bool and_(bool a, bool b) { return a & b; }
HWY_INLINE bool or_(bool a, bool b) { return a | b; }
HWY_INLINE bool xor_(bool a, bool b) { return a ^ b; }

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
