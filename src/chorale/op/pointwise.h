// Pointwise functions of tensors and numbers. Shapes broadcast and dtypes promote as in PyTorch: tensors with
// dimensions decide, then tensors without, then numbers; a later kind counts only when its category (bool, integer,
// floating, complex) is higher. Functions of real numbers turn integers into f32.
//
// Most functions have three forms, declared together:
//   add(x, y)            a new tensor
//   add_(x, y)           overwrites x, whose shape and dtype stay; returns x
//   add_out(out, x, y)   overwrites `out`, which may be x or y; returns it
// A result of a higher category than the tensor it is to be written into is an error.
#pragma once

#include <optional>

#include "chorale/op/op_def.h"

namespace chorale {

#define CHORALE_FORMS(name, ...)      \
  Tensor name(__VA_ARGS__);           \
  const Tensor& name##_(__VA_ARGS__); \
  const Tensor& name##_out(const Tensor& out, __VA_ARGS__);

// ---- arithmetic

CHORALE_FORMS(add, const Tensor& x, const Tensor& y, Scalar alpha = 1)  // x + alpha * y
CHORALE_FORMS(add, const Tensor& x, Scalar y, Scalar alpha = 1)
CHORALE_FORMS(sub, const Tensor& x, const Tensor& y, Scalar alpha = 1)  // x - alpha * y
CHORALE_FORMS(sub, const Tensor& x, Scalar y, Scalar alpha = 1)
CHORALE_FORMS(rsub, const Tensor& x, Scalar y)  // y - x
CHORALE_FORMS(mul, const Tensor& x, const Tensor& y)
CHORALE_FORMS(mul, const Tensor& x, Scalar y)
// True division: integers give f32, unless the quotient is rounded. An integer divided by zero is an error then.
enum class Rounding : uint8_t { kNone, kFloor, kTrunc };
CHORALE_FORMS(div, const Tensor& x, const Tensor& y, Rounding rounding = Rounding::kNone)
CHORALE_FORMS(div, const Tensor& x, Scalar y, Rounding rounding = Rounding::kNone)
CHORALE_FORMS(rdiv, const Tensor& x, Scalar y)  // y / x
CHORALE_FORMS(floor_divide, const Tensor& x, const Tensor& y)
CHORALE_FORMS(floor_divide, const Tensor& x, Scalar y)
// x - y * floor(x / y): has the sign of y.
CHORALE_FORMS(remainder, const Tensor& x, const Tensor& y)
CHORALE_FORMS(remainder, const Tensor& x, Scalar y)
CHORALE_FORMS(pow, const Tensor& x, const Tensor& y)
CHORALE_FORMS(pow, const Tensor& x, Scalar y)
Tensor pow(Scalar x, const Tensor& y);
// NaN wins. At a tie either tensor gets half of the gradient; beside a number, none.
CHORALE_FORMS(minimum, const Tensor& x, const Tensor& y)
CHORALE_FORMS(maximum, const Tensor& x, const Tensor& y)
CHORALE_FORMS(minimum, const Tensor& x, Scalar y)
CHORALE_FORMS(maximum, const Tensor& x, Scalar y)
// At least one bound is given. No gradient at a bound.
CHORALE_FORMS(clamp, const Tensor& x, std::optional<Scalar> min, std::optional<Scalar> max = {})
Tensor clamp(const Tensor& x, const Tensor& min, const Tensor& max);
CHORALE_FORMS(neg, const Tensor& x)
CHORALE_FORMS(abs, const Tensor& x)   // complex: the modulus, real
CHORALE_FORMS(sign, const Tensor& x)  // complex: x / |x|, and 0 for 0
CHORALE_FORMS(reciprocal, const Tensor& x)
CHORALE_FORMS(square, const Tensor& x)
CHORALE_FORMS(sqrt, const Tensor& x)
CHORALE_FORMS(rsqrt, const Tensor& x)
CHORALE_FORMS(floor, const Tensor& x)
CHORALE_FORMS(ceil, const Tensor& x)
CHORALE_FORMS(round, const Tensor& x)  // half to even
CHORALE_FORMS(trunc, const Tensor& x)
// x + weight * (y - x)
CHORALE_FORMS(lerp, const Tensor& x, const Tensor& y, const Tensor& weight)
CHORALE_FORMS(lerp, const Tensor& x, const Tensor& y, Scalar weight)
// x + value * y * z, x + value * y / z
CHORALE_FORMS(addcmul, const Tensor& x, const Tensor& y, const Tensor& z, Scalar value = 1)
CHORALE_FORMS(addcdiv, const Tensor& x, const Tensor& y, const Tensor& z, Scalar value = 1)

// ---- functions

CHORALE_FORMS(exp, const Tensor& x)
CHORALE_FORMS(exp2, const Tensor& x)
CHORALE_FORMS(expm1, const Tensor& x)
CHORALE_FORMS(log, const Tensor& x)
CHORALE_FORMS(log2, const Tensor& x)
CHORALE_FORMS(log10, const Tensor& x)
CHORALE_FORMS(log1p, const Tensor& x)
CHORALE_FORMS(sin, const Tensor& x)
CHORALE_FORMS(cos, const Tensor& x)
CHORALE_FORMS(tan, const Tensor& x)
CHORALE_FORMS(tanh, const Tensor& x)
CHORALE_FORMS(erf, const Tensor& x)

// ---- activations

CHORALE_FORMS(sigmoid, const Tensor& x)
CHORALE_FORMS(relu, const Tensor& x)
CHORALE_FORMS(leaky_relu, const Tensor& x, double negative_slope = 0.01)
enum class Gelu : uint8_t { kErf, kTanh };  // exact, or its approximation by tanh
CHORALE_FORMS(gelu, const Tensor& x, Gelu form = Gelu::kErf)
CHORALE_FORMS(silu, const Tensor& x)
CHORALE_FORMS(elu, const Tensor& x, double alpha = 1)
// log(1 + exp(beta x)) / beta, and x itself where beta x > threshold.
CHORALE_FORMS(softplus, const Tensor& x, double beta = 1, double threshold = 20)
// clamp under its other name; the gradient of NaN passes.
CHORALE_FORMS(hardtanh, const Tensor& x, double min = -1, double max = 1)

// ---- comparisons and logic; the result is bool

CHORALE_FORMS(eq, const Tensor& x, const Tensor& y)
CHORALE_FORMS(eq, const Tensor& x, Scalar y)
CHORALE_FORMS(ne, const Tensor& x, const Tensor& y)
CHORALE_FORMS(ne, const Tensor& x, Scalar y)
CHORALE_FORMS(lt, const Tensor& x, const Tensor& y)
CHORALE_FORMS(lt, const Tensor& x, Scalar y)
CHORALE_FORMS(le, const Tensor& x, const Tensor& y)
CHORALE_FORMS(le, const Tensor& x, Scalar y)
CHORALE_FORMS(gt, const Tensor& x, const Tensor& y)
CHORALE_FORMS(gt, const Tensor& x, Scalar y)
CHORALE_FORMS(ge, const Tensor& x, const Tensor& y)
CHORALE_FORMS(ge, const Tensor& x, Scalar y)
CHORALE_FORMS(logical_and, const Tensor& x, const Tensor& y)
CHORALE_FORMS(logical_or, const Tensor& x, const Tensor& y)
CHORALE_FORMS(logical_xor, const Tensor& x, const Tensor& y)
CHORALE_FORMS(logical_not, const Tensor& x)
CHORALE_FORMS(isnan, const Tensor& x)
CHORALE_FORMS(isinf, const Tensor& x)
CHORALE_FORMS(isfinite, const Tensor& x)

// ---- bits of integers and bools

CHORALE_FORMS(bitwise_and, const Tensor& x, const Tensor& y)
CHORALE_FORMS(bitwise_or, const Tensor& x, const Tensor& y)
CHORALE_FORMS(bitwise_xor, const Tensor& x, const Tensor& y)
CHORALE_FORMS(bitwise_not, const Tensor& x)

// ---- choice: x where the condition (bool) holds, y elsewhere

Tensor where(const Tensor& condition, const Tensor& x, const Tensor& y);
Tensor where(const Tensor& condition, Scalar x, const Tensor& y);
Tensor where(const Tensor& condition, const Tensor& x, Scalar y);
const Tensor& where_out(const Tensor& out, const Tensor& condition, const Tensor& x, const Tensor& y);
// x with `value` where the mask (bool, broadcast to x) holds; the dtype stays that of x.
CHORALE_FORMS(masked_fill, const Tensor& x, const Tensor& mask, Scalar value)

// ---- complex numbers; real tensors pass through real and conj unchanged (the tensor itself)

Tensor real(const Tensor& x);
Tensor imag(const Tensor& x);
Tensor conj(const Tensor& x);
Tensor angle(const Tensor& x);

#undef CHORALE_FORMS

// ---- operators; there is no ==, since a tensor of comparisons is not a condition: see eq()

inline Tensor operator+(const Tensor& x, const Tensor& y) { return add(x, y); }
inline Tensor operator+(const Tensor& x, Scalar y) { return add(x, y); }
inline Tensor operator+(Scalar x, const Tensor& y) { return add(y, x); }
inline Tensor operator-(const Tensor& x, const Tensor& y) { return sub(x, y); }
inline Tensor operator-(const Tensor& x, Scalar y) { return sub(x, y); }
inline Tensor operator-(Scalar x, const Tensor& y) { return rsub(y, x); }
inline Tensor operator*(const Tensor& x, const Tensor& y) { return mul(x, y); }
inline Tensor operator*(const Tensor& x, Scalar y) { return mul(x, y); }
inline Tensor operator*(Scalar x, const Tensor& y) { return mul(y, x); }
inline Tensor operator/(const Tensor& x, const Tensor& y) { return div(x, y); }
inline Tensor operator/(const Tensor& x, Scalar y) { return div(x, y); }
inline Tensor operator/(Scalar x, const Tensor& y) { return rdiv(y, x); }
inline Tensor operator-(const Tensor& x) { return neg(x); }

}  // namespace chorale
