// The vocabulary of vec/scalar_ops.inc for one element on a GPU.
namespace v {

#define REAL1(name, expression)                      \
  __device__ __forceinline__ float name(float x) {   \
    typedef float T;                                 \
    return expression;                               \
  }                                                  \
  __device__ __forceinline__ double name(double x) { \
    typedef double T;                                \
    return expression;                               \
  }
#define REAL2(Result, name, expression)                                \
  __device__ __forceinline__ Result(float) name(float a, float b) {    \
    typedef float T;                                                   \
    return expression;                                                 \
  }                                                                    \
  __device__ __forceinline__ Result(double) name(double a, double b) { \
    typedef double T;                                                  \
    return expression;                                                 \
  }
#define SAME(T) T
#define TRUTH(T) bool

REAL1(neg, -x)
REAL1(abs, ::fabs(x))
REAL1(sqrt, ::sqrt(x))
REAL1(floor, ::floor(x))
REAL1(ceil, ::ceil(x))
REAL1(round, ::rint(x))
REAL1(trunc, ::trunc(x))
REAL1(exp, ::exp(x))
REAL1(exp2, ::exp2(x))
REAL1(expm1, ::expm1(x))
REAL1(log, ::log(x))
REAL1(log2, ::log2(x))
REAL1(log10, ::log10(x))
REAL1(log1p, ::log1p(x))
REAL1(sin, ::sin(x))
REAL1(cos, ::cos(x))
REAL1(tan, ::tan(x))
REAL1(tanh, ::tanh(x))
REAL1(erf, ::erf(x))
REAL1(normal_cdf, T(0.5) * ::erfc(x * T(-0.70710678118654752440)))
REAL1(sigmoid, T(1) / (T(1) + ::exp(-x)))
// For results of 16 bits: they err by less than 2^-14, and take a third of the time or less.
__device__ __forceinline__ float exp2_16(float x) {
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}
__device__ __forceinline__ float reciprocal_16(float x) {
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}
__device__ __forceinline__ float exp_16(float x) { return exp2_16(x * 1.4426950408889634f); }
__device__ __forceinline__ float sigmoid_16(float x) { return reciprocal_16(1.0f + exp_16(-x)); }
// With z = |x| / sqrt(2): erfc(z) exp(z^2) as a polynomial in 1 / (1 + 0.53 z), fitted for the least relative error, of
// 3.2e-5.
__device__ __forceinline__ float normal_cdf_16(float x) {
  const float t = reciprocal_16(::fmaf(0.53f * 0.70710678f, ::fabsf(x), 1.0f));
  float sum = ::fmaf(-0.18099911f, t, 0.40086649f);
  sum = ::fmaf(sum, t, 0.16691306f);
  sum = ::fmaf(sum, t, 0.31528245f);
  sum = ::fmaf(sum, t, 0.29793845f);
  // The exponential is the one in the gradient of GELU: the compiler makes it once.
  const float tail = 0.5f * t * sum * exp_16((x * x) * -0.5f);
  return x > 0 ? 1.0f - tail : tail;
}
REAL1(sign, x > 0 ? T(1) : x < 0 ? T(-1) : T(0))
REAL1(angle, x != x ? x : x < 0 ? T(3.14159265358979323846) : T(0))
REAL2(SAME, add, a + b)
REAL2(SAME, sub, a - b)
REAL2(SAME, mul, a* b)
REAL2(SAME, div, a / b)
REAL2(SAME, min, a != a ? a : (a < b ? a : b))
REAL2(SAME, max, a != a ? a : (a > b ? a : b))
REAL2(SAME, pow, ::pow(a, b))
REAL2(SAME, trunc_divide, ::trunc(a / b))
REAL2(TRUTH, lt, a < b)
REAL2(TRUTH, le, a <= b)
REAL2(TRUTH, gt, a > b)
REAL2(TRUTH, ge, a >= b)
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return ::fma(a, b, c); }
template <class T>
__device__ __forceinline__ T real_remainder(T a, T b) {
  const T mod = ::fmod(a, b);
  return mod != 0 && (b < 0) != (mod < 0) ? mod + b : mod;
}
__device__ __forceinline__ float remainder(float a, float b) { return real_remainder(a, b); }
__device__ __forceinline__ double remainder(double a, double b) { return real_remainder(a, b); }
template <class T>
__device__ __forceinline__ T real_floor_divide(T a, T b) {
  const T quotient = a / b;
  if (b == 0) return quotient;
  const T mod = ::fmod(a, b);
  const T rounded = ::rint((a - mod) / b);
  const T integral = mod != 0 && (b < 0) != (mod < 0) ? rounded - 1 : rounded;
  return integral == 0 ? ::copysign(T(0), quotient) : integral;
}
__device__ __forceinline__ float floor_divide(float a, float b) { return real_floor_divide(a, b); }
__device__ __forceinline__ double floor_divide(double a, double b) { return real_floor_divide(a, b); }
template <class T>
__device__ __forceinline__ bool isnan(T x) {
  return x != x;
}
template <class T>
__device__ __forceinline__ bool isinf(T x) {
  return ::isinf(x);
}
template <class T>
__device__ __forceinline__ bool isfinite(T x) {
  return ::isfinite(x);
}

// ---- integers wrap around

template <class T>
__device__ __forceinline__ T integer_power(T base, T exponent) {
  if (exponent < T(0)) {
    if (base == T(1)) return base;
    return base == T(-1) ? T(exponent % 2 != 0 ? -1 : 1) : T(0);
  }
  u64 result = 1, square = (u64)base;
  for (u64 e = (u64)exponent; e != 0; e >>= 1, square *= square) {
    if ((e & 1) != 0) result *= square;
  }
  return (T)result;
}
#define INTEGER(T)                                                                \
  __device__ __forceinline__ T add(T a, T b) { return (T)((u64)a + (u64)b); }     \
  __device__ __forceinline__ T sub(T a, T b) { return (T)((u64)a - (u64)b); }     \
  __device__ __forceinline__ T mul(T a, T b) { return (T)((u64)a * (u64)b); }     \
  __device__ __forceinline__ T fma(T a, T b, T c) { return add(mul(a, b), c); }   \
  __device__ __forceinline__ T min(T a, T b) { return b < a ? b : a; }            \
  __device__ __forceinline__ T max(T a, T b) { return a < b ? b : a; }            \
  __device__ __forceinline__ T bit_and(T a, T b) { return (T)(a & b); }           \
  __device__ __forceinline__ T bit_or(T a, T b) { return (T)(a | b); }            \
  __device__ __forceinline__ T bit_xor(T a, T b) { return (T)(a ^ b); }           \
  __device__ __forceinline__ T bit_not(T x) { return (T)~x; }                     \
  __device__ __forceinline__ T neg(T x) { return (T)(0 - (u64)x); }               \
  __device__ __forceinline__ T abs(T x) { return x < T(0) ? neg(x) : x; }         \
  __device__ __forceinline__ T sign(T x) { return (T)((x > T(0)) - (x < T(0))); } \
  __device__ __forceinline__ T pow(T a, T b) { return integer_power(a, b); }      \
  __device__ __forceinline__ T floor_divide(T a, T b) {                           \
    if (b == 0) return 0;                                                         \
    if (T(-1) < T(0) && b == T(-1)) return neg(a);                                \
    return (T)(a / b - (a % b != 0 && (a < T(0)) != (b < T(0)) ? 1 : 0));         \
  }                                                                               \
  __device__ __forceinline__ T trunc_divide(T a, T b) {                           \
    if (b == 0) return 0;                                                         \
    return T(-1) < T(0) && b == T(-1) ? neg(a) : (T)(a / b);                      \
  }                                                                               \
  __device__ __forceinline__ T remainder(T a, T b) {                              \
    if (b == 0 || (T(-1) < T(0) && b == T(-1))) return 0;                         \
    const T rest = (T)(a % b);                                                    \
    return (T)(rest != 0 && (rest < T(0)) != (b < T(0)) ? rest + b : rest);       \
  }                                                                               \
  __device__ __forceinline__ bool lt(T a, T b) { return a < b; }                  \
  __device__ __forceinline__ bool le(T a, T b) { return a <= b; }                 \
  __device__ __forceinline__ bool gt(T a, T b) { return a > b; }                  \
  __device__ __forceinline__ bool ge(T a, T b) { return a >= b; }
INTEGER(u8)
INTEGER(i8)
INTEGER(i16)
INTEGER(i32)
INTEGER(i64)

__device__ __forceinline__ bool add(bool a, bool b) { return a | b; }
__device__ __forceinline__ bool mul(bool a, bool b) { return a & b; }
__device__ __forceinline__ bool min(bool a, bool b) { return a & b; }
__device__ __forceinline__ bool max(bool a, bool b) { return a | b; }
__device__ __forceinline__ bool bit_and(bool a, bool b) { return a & b; }
__device__ __forceinline__ bool bit_or(bool a, bool b) { return a | b; }
__device__ __forceinline__ bool bit_xor(bool a, bool b) { return a ^ b; }
__device__ __forceinline__ bool bit_not(bool x) { return !x; }
__device__ __forceinline__ bool sign(bool x) { return x; }
__device__ __forceinline__ bool lt(bool a, bool b) { return !a & b; }
__device__ __forceinline__ bool le(bool a, bool b) { return !a | b; }
__device__ __forceinline__ bool gt(bool a, bool b) { return a & !b; }
__device__ __forceinline__ bool ge(bool a, bool b) { return a | !b; }

// ---- complex numbers

#define COMPLEX      \
  template <class R> \
  __device__ __forceinline__ Complex<R>
COMPLEX add(Complex<R> a, Complex<R> b) { return {a.re + b.re, a.im + b.im}; }
COMPLEX sub(Complex<R> a, Complex<R> b) { return {a.re - b.re, a.im - b.im}; }
COMPLEX mul(Complex<R> a, Complex<R> b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
COMPLEX fma(Complex<R> a, Complex<R> b, Complex<R> c) { return add(mul(a, b), c); }
COMPLEX div(Complex<R> a, Complex<R> b) {
  if (::fabs(b.re) >= ::fabs(b.im)) {
    if (b.re == 0 && b.im == 0) return {a.re / ::fabs(b.re), a.im / ::fabs(b.im)};
    const R ratio = b.im / b.re, scale = 1 / (b.re + b.im * ratio);
    return {(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
  }
  const R ratio = b.re / b.im, scale = 1 / (b.re * ratio + b.im);
  return {(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}
COMPLEX neg(Complex<R> x) { return {-x.re, -x.im}; }
COMPLEX conj(Complex<R> x) { return {x.re, -x.im}; }
template <class R>
__device__ __forceinline__ R real(Complex<R> x) {
  return x.re;
}
template <class R>
__device__ __forceinline__ R imag(Complex<R> x) {
  return x.im;
}
template <class R>
__device__ __forceinline__ R abs(Complex<R> x) {
  return ::hypot(x.re, x.im);
}
template <class R>
__device__ __forceinline__ R angle(Complex<R> x) {
  return ::atan2(x.im, x.re);
}
COMPLEX exp(Complex<R> x) {
  const R size = ::exp(x.re);
  return {size * ::cos(x.im), size * ::sin(x.im)};
}
COMPLEX log(Complex<R> x) { return {::log(abs(x)), angle(x)}; }
COMPLEX sqrt(Complex<R> x) {
  if (x.re == 0 && x.im == 0) return {R(0), x.im};
  const R half = ::sqrt((::fabs(x.re) + abs(x)) / 2), other = ::fabs(x.im) / (2 * half);
  return x.re >= 0 ? Complex<R>{half, ::copysign(other, x.im)} : Complex<R>{other, ::copysign(half, x.im)};
}
COMPLEX sin(Complex<R> x) { return {::sin(x.re) * ::cosh(x.im), ::cos(x.re) * ::sinh(x.im)}; }
COMPLEX cos(Complex<R> x) { return {::cos(x.re) * ::cosh(x.im), -(::sin(x.re) * ::sinh(x.im))}; }
COMPLEX tan(Complex<R> x) { return div(sin(x), cos(x)); }
COMPLEX tanh(Complex<R> x) {
  const Complex<R> y = tan(Complex<R>{-x.im, x.re});  // tanh(x) = -i tan(i x)
  return {y.im, -y.re};
}
COMPLEX pow(Complex<R> a, Complex<R> b) {
  if (b.re == 0 && b.im == 0) return {R(1), R(0)};
  if (a.re == 0 && a.im == 0) return a;
  return exp(mul(b, log(a)));
}
COMPLEX sigmoid(Complex<R> x) { return div(Complex<R>{R(1), R(0)}, add(Complex<R>{R(1), R(0)}, exp(neg(x)))); }
COMPLEX sign(Complex<R> x) {
  if (x.re == 0 && x.im == 0) return x;
  const R size = abs(x);
  return {x.re / size, x.im / size};
}
template <class R>
__device__ __forceinline__ bool isnan(Complex<R> x) {
  return x.re != x.re || x.im != x.im;
}
template <class R>
__device__ __forceinline__ bool isinf(Complex<R> x) {
  return ::isinf(x.re) || ::isinf(x.im);
}
template <class R>
__device__ __forceinline__ bool isfinite(Complex<R> x) {
  return ::isfinite(x.re) && ::isfinite(x.im);
}

// ---- for all of them

template <class T>
__device__ __forceinline__ bool eq(T a, T b) {
  if constexpr (IsComplex<T>::value) {
    return a.re == b.re && a.im == b.im;
  } else {
    return a == b;
  }
}
template <class T>
__device__ __forceinline__ bool ne(T a, T b) {
  return !eq(a, b);
}
template <class T>
__device__ __forceinline__ T select(bool condition, T a, T b) {
  return condition ? a : b;
}
__device__ __forceinline__ bool and_(bool a, bool b) { return a & b; }
__device__ __forceinline__ bool or_(bool a, bool b) { return a | b; }
__device__ __forceinline__ bool xor_(bool a, bool b) { return a ^ b; }

}  // namespace v

// The numbers among a call's attributes.
struct Params {
  double f[8];
  i64 i[8];
  Fault* fault;
  i64 row;
};
template <class L>
__device__ __forceinline__ L literal(double x) {
  return cast<L>(x);
}
template <class L>
__device__ __forceinline__ L parameter(const Params& p, int at) {
  if constexpr (IsComplex<L>::value) {
    typedef decltype(L().re) R;
    return L{(R)p.f[2 * at], (R)p.f[2 * at + 1]};
  } else if constexpr (kIsFloating<L> || IsSame<L, f16>::value || IsSame<L, bf16>::value) {
    return cast<L>(p.f[at]);
  } else if constexpr (IsSame<L, bool>::value) {
    return p.i[at] != 0;
  } else {
    return (L)p.i[at];
  }
}
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
