// The words that generated kernels are written in: vectors of f32 and f64 as the compiler's vector extensions have them,
// with the eager loops' own polynomials (vec/math-inl.h), so that a fused kernel has the bits of the ops one by one. No
// header is included: compiling this text is most of the time of a kernel.
//
// F, I: f32 lanes and their masks. D, J: f64 lanes and theirs. A mask is -1 where true, 0 elsewhere. A loop over lanes
// becomes one instruction.
#if defined(__AVX512F__)
#define LF 16
#elif defined(__AVX2__)
#define LF 8
#else
#define LF 4
#endif
#define LD (LF / 2)
#define INLINE static inline __attribute__((always_inline, unused))
typedef float F __attribute__((vector_size(LF * 4)));
typedef int I __attribute__((vector_size(LF * 4)));
typedef unsigned U __attribute__((vector_size(LF * 4)));
typedef unsigned short H __attribute__((vector_size(LF * 2)));
typedef unsigned char BF __attribute__((vector_size(LF)));
typedef double D __attribute__((vector_size(LD * 8)));
typedef long J __attribute__((vector_size(LD * 8)));
typedef unsigned char BD __attribute__((vector_size(LD)));
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef long i64;

// ---- numbers. c - 0 keeps the sign of zero.
INLINE F f_splat(float c) { return c - (F){}; }
INLINE D d_splat(double c) { return c - (D){}; }

// ---- masks
INLINE F f_select(I m, F a, F b) { return (F)(((I)a & m) | ((I)b & ~m)); }
INLINE D d_select(J m, D a, D b) { return (D)(((J)a & m) | ((J)b & ~m)); }
INLINE F f_number(I m) { return f_select(m, f_splat(1), f_splat(0)); }
INLINE D d_number(J m) { return d_select(m, d_splat(1), d_splat(0)); }

// ---- lane by lane
#if defined(__FMA__)
#define FMA_F(a, b, c) __builtin_fmaf(a, b, c)
#define FMA_D(a, b, c) __builtin_fma(a, b, c)
#else
#define FMA_F(a, b, c) ((a) * (b) + (c))
#define FMA_D(a, b, c) ((a) * (b) + (c))
#endif
#define LANES_F(expression)                          \
  F r;                                               \
  for (int l = 0; l < LF; ++l) r[l] = (expression);  \
  return r
#define LANES_D(expression)                          \
  D r;                                               \
  for (int l = 0; l < LD; ++l) r[l] = (expression);  \
  return r
// The instruction is named here, since gcc makes scalars of lanes that are all one number, and puts them together
// again.
#if defined(__AVX512F__)
INLINE F f_fma(F a, F b, F c) { return (F)__builtin_ia32_vfmaddps512_mask(a, b, c, (unsigned short)-1, 4); }
INLINE D d_fma(D a, D b, D c) { return (D)__builtin_ia32_vfmaddpd512_mask(a, b, c, (unsigned char)-1, 4); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE F f_fma(F a, F b, F c) { return (F)__builtin_ia32_vfmaddps256(a, b, c); }
INLINE D d_fma(D a, D b, D c) { return (D)__builtin_ia32_vfmaddpd256(a, b, c); }
#else
INLINE F f_fma(F a, F b, F c) { LANES_F(FMA_F(a[l], b[l], c[l])); }
INLINE D d_fma(D a, D b, D c) { LANES_D(FMA_D(a[l], b[l], c[l])); }
#endif
INLINE F f_sqrt(F x) { LANES_F(__builtin_sqrtf(x[l])); }
INLINE D d_sqrt(D x) { LANES_D(__builtin_sqrt(x[l])); }
INLINE F f_floor(F x) { LANES_F(__builtin_floorf(x[l])); }
INLINE D d_floor(D x) { LANES_D(__builtin_floor(x[l])); }
INLINE F f_ceil(F x) { LANES_F(__builtin_ceilf(x[l])); }
INLINE D d_ceil(D x) { LANES_D(__builtin_ceil(x[l])); }
INLINE F f_round(F x) { LANES_F(__builtin_rintf(x[l])); }
INLINE D d_round(D x) { LANES_D(__builtin_rint(x[l])); }
INLINE F f_trunc(F x) { LANES_F(__builtin_truncf(x[l])); }
INLINE D d_trunc(D x) { LANES_D(__builtin_trunc(x[l])); }

// ---- bits
INLINE F f_abs(F x) { return (F)((I)x & 0x7fffffff); }
INLINE D d_abs(D x) { return (D)((J)x & 0x7fffffffffffffffL); }
INLINE F f_copysign(F x, F s) { return (F)(((I)x & 0x7fffffff) | ((I)s & ~0x7fffffff)); }
INLINE D d_copysign(D x, D s) { return (D)(((J)x & 0x7fffffffffffffffL) | ((J)s & ~0x7fffffffffffffffL)); }

// ---- order. The smaller of the processor: its second argument where either is NaN. Users get NaN where either is NaN.
#if defined(__AVX512F__) && defined(__clang__)
INLINE F f_least(F a, F b) { return (F)__builtin_ia32_minps512(a, b, 4); }
INLINE F f_most(F a, F b) { return (F)__builtin_ia32_maxps512(a, b, 4); }
#elif defined(__AVX512F__)
INLINE F f_least(F a, F b) { return (F)__builtin_ia32_minps512_mask(a, b, (F){}, (unsigned short)-1, 4); }
INLINE F f_most(F a, F b) { return (F)__builtin_ia32_maxps512_mask(a, b, (F){}, (unsigned short)-1, 4); }
#elif defined(__AVX2__)
INLINE F f_least(F a, F b) { return (F)__builtin_ia32_minps256(a, b); }
INLINE F f_most(F a, F b) { return (F)__builtin_ia32_maxps256(a, b); }
#else
INLINE F f_least(F a, F b) { return f_select(a < b, a, b); }
INLINE F f_most(F a, F b) { return f_select(a > b, a, b); }
#endif
INLINE D d_least(D a, D b) { return d_select(a < b, a, b); }
INLINE D d_most(D a, D b) { return d_select(a > b, a, b); }
INLINE F f_min(F a, F b) { return f_select(a != a, a, f_least(a, b)); }
INLINE F f_max(F a, F b) { return f_select(a != a, a, f_most(a, b)); }
INLINE D d_min(D a, D b) { return d_select(a != a, a, d_least(a, b)); }
INLINE D d_max(D a, D b) { return d_select(a != a, a, d_most(a, b)); }
INLINE F f_sign(F x) { return f_select(x > 0, f_splat(1), f_select(x < 0, f_splat(-1), f_splat(0))); }
INLINE D d_sign(D x) { return d_select(x > 0, d_splat(1), d_select(x < 0, d_splat(-1), d_splat(0))); }
INLINE I f_isnan(F x) { return x != x; }
INLINE J d_isnan(D x) { return x != x; }
INLINE I f_isinf(F x) { return f_abs(x) == __builtin_inff(); }
INLINE J d_isinf(D x) { return d_abs(x) == __builtin_inf(); }
INLINE I f_isfinite(F x) { return f_abs(x) < __builtin_inff(); }
INLINE J d_isfinite(D x) { return d_abs(x) < __builtin_inf(); }

// ---- elementary functions of f32. Highest coefficient first.
#define POLY1(x, p, a) f_fma(p, x, f_splat(a))
#define POLY2(x, p, a, b) POLY1(x, POLY1(x, p, a), b)
#define POLY3(x, p, a, b, c) POLY1(x, POLY2(x, p, a, b), c)
#define POLY5(x, p, a, b, c, d, e) POLY2(x, POLY3(x, p, a, b, c), d, e)

// p * 2^n for integral n in [-252, 254], in two steps, since the factor itself may leave the range of normal numbers.
INLINE F f_scale(F p, F n) {
  I i = __builtin_convertvector(n, I), half = i >> 1;
  F first = (F)((half + 127) << 23), second = (F)((i - half + 127) << 23);
  return p * first * second;
}
// x = n ln 2 + r with |r| <= ln 2 / 2.
INLINE F f_ln2s(F x) { return f_round(x * f_splat(1.44269504f)); }
INLINE F f_without_ln2s(F x, F n) {
  return f_fma(-n, f_splat(0x1.7f7d1cp-20f), f_fma(-n, f_splat(0x1.62e400p-1f), x));
}
// exp(r) for |r| <= ln 2 / 2.
INLINE F f_exp_of_reduced(F r) {
  return POLY1(r, POLY5(r, f_splat(0x1.694000p-10f), 0x1.125edcp-7f, 0x1.555b5ap-5f, 0x1.555450p-3f, 0x1.fffff6p-2f, 1.0f), 1.0f);
}
INLINE F f_limit(F x, float low, float high) { return f_most(f_splat(low), f_least(f_splat(high), x)); }
INLINE F f_exp(F x) {
  x = f_limit(x, -104.0f, 89.0f);
  F n = f_ln2s(x);
  return f_scale(f_exp_of_reduced(f_without_ln2s(x, n)), n);
}
INLINE F f_exp2(F x) {
  x = f_limit(x, -151.0f, 129.0f);
  F n = f_round(x);
  return f_scale(f_exp_of_reduced((x - n) * f_splat(0.693147180559945f)), n);
}
// A number as the sum of two: what an f32 holds of it, and what rounding took away.
typedef struct { F high, low; } Sum;
INLINE Sum f_exact_sum(F a, F b) {
  F high = a + b;
  return (Sum){high, b - (high - a)};
}
// one * (exp(x) - 1) for one = 1 or 1/2.
INLINE Sum f_exp_minus_one(F x, float unit) {
  F n = f_ln2s(x), first = f_fma(-n, f_splat(0x1.62e400p-1f), x), r = f_fma(-n, f_splat(0x1.7f7d1cp-20f), first);
  F r_low = f_fma(-n, f_splat(0x1.7f7d1cp-20f), first - r), s = r * r, half = f_splat(0.5f);
  Sum p = f_exact_sum(r, s * half);
  F cubic = POLY1(r, POLY3(r, f_splat(0x1.9fbd9cp-13f), 0x1.6d419ep-10f, 0x1.1111ccp-7f, 0x1.5554f2p-5f), 0x1.555554p-3f);
  F low = f_fma(f_fma(r, r, -s), half, f_fma(s * r, cubic, p.low + r_low));
  F one = f_splat(unit), scale = f_scale(one, n), less_one = scale - one;
  Sum sum = f_exact_sum(less_one, scale * p.high);
  F rest = unit == 1 ? sum.low : sum.low + (scale - less_one - one);
  return (Sum){sum.high, f_fma(scale, low, rest)};
}
INLINE F f_expm1(F x) {
  Sum half = f_exp_minus_one(f_limit(x, -25.0f, 89.0f), 0.5f);
  F y = half.high + half.low;
  return f_select(f_abs(x) < f_splat(0x1p-25f), x, y + y);
}
INLINE F f_sigmoid(F x) { return f_splat(1) / (f_splat(1) + f_exp(-x)); }
INLINE F f_log(F x) {
  I denormal = x < f_splat(0x1p-126f);
  F scaled = f_select(denormal, x * f_splat(0x1p23f), x);
  I bits = (I)scaled, e = (bits - (I)f_splat(0.666666667f)) & -0x800000;
  F exponent = f_fma(__builtin_convertvector(e, F), f_splat(0x1p-23f), f_select(denormal, f_splat(-23), f_splat(0)));
  F f = (F)(bits - e) - f_splat(1), s = f * f;
  F high = f_fma(f_splat(-0x1.0ae000p-3f), f, f_splat(0x1.208000p-3f));
  F low = f_fma(f_splat(-0x1.f198b2p-4f), f, f_splat(0x1.1e5740p-3f));
  F p = POLY5(f, f_fma(high, s, low), -0x1.55b36cp-3f, 0x1.99d8b2p-3f, -0x1.fffe02p-3f, 0x1.5554fap-2f, -0.5f);
  p = f_fma(p, s, f);
  p = f_fma(exponent, f_splat(0x1.62e430p-1f), p);
  p = f_select(x < f_splat(__builtin_inff()), p, x);
  p = f_select(x == 0, f_splat(-__builtin_inff()), p);
  return f_select(x < 0, f_splat(__builtin_nanf("")), p);
}
INLINE F f_log1p(F x) {
  F one = f_splat(1), half = f_splat(0.5f), u = one + x, lost = x - (u - one);
  I bits = (I)u, e = (bits - (I)f_splat(0.666666667f)) & -0x800000;
  F exponent = __builtin_convertvector(e, F) * f_splat(0x1p-23f), f = (F)(bits - e) - one, s = f * f;
  F high = f_fma(f_splat(-0x1.08054ap-3f), f, f_splat(0x1.1e6710p-3f));
  F low = f_fma(f_splat(-0x1.f31158p-4f), f, f_splat(0x1.1ed706p-3f));
  F cubic = POLY1(f, POLY3(f, f_fma(high, s, low), -0x1.559dcap-3f, 0x1.99d02ap-3f, -0x1.fffef0p-3f), 0x1.555506p-2f);
  Sum p = f_exact_sum(f, s * f_splat(-0.5f)), sum = f_exact_sum(exponent * f_splat(0x1.62e400p-1f), p.high);
  F rest = f_fma(-f_fma(f, f, -s), half, f_fma(f * s, cubic, sum.low + p.low));
  rest = f_fma(exponent, f_splat(0x1.7f7d1cp-20f), rest);
  F y = sum.high + (rest + lost / u);
  y = f_select((x < f_splat(__builtin_inff())) & (x != 0), y, x);
  y = f_select(u == 0, f_splat(-__builtin_inff()), y);
  return f_select(u < 0, f_splat(__builtin_nanf("")), y);
}
INLINE F f_tanh(F x) {
  F t = f_abs(x), two = f_splat(2);
  Sum e = f_exp_minus_one(f_least(f_splat(18.2f), t + t), 1);
  e = f_exact_sum(e.high, e.low);
  F divisor = two + e.high, divisor_low = e.high - (divisor - two) + e.low;
  F inverse = f_splat(1) / divisor, y = e.high * inverse;
  F rest = f_fma(-y, divisor, e.high) + f_fma(-y, divisor_low, e.low);
  return f_copysign(f_fma(rest, inverse, y), x);
}
INLINE F f_erf(F x) {
  F t = f_abs(x), s = x * x, limited = f_least(f_splat(4), t), square = limited * limited;
  F high = f_fma(f_splat(-0x1.220000p-16f), limited, f_splat(0x1.91cfb2p-12f));
  F low = f_fma(f_splat(-0x1.fd1438p-9f), limited, f_splat(0x1.8d6342p-6f));
  F q = POLY3(limited, f_fma(high, square, low), -0x1.b55cb8p-4f, -0x1.450aa0p-1f, -0x1.079d0cp-3f);
  q = f_fma(q, limited, -limited);
  F n = f_ln2s(q), large = f_splat(1) - f_scale(f_exp_of_reduced(f_without_ln2s(q, n)), n);
  F p = POLY5(s, f_splat(-0x1.38e000p-11f), 0x1.471a58p-8f, -0x1.b691b2p-6f, 0x1.ce1c44p-4f, -0x1.812700p-2f, 0x1.06eba8p-3f);
  F small = f_fma(p, t, t);
  return f_copysign(f_select(t > f_splat(0.927734375f), large, small), x);
}
INLINE F f_normal_cdf(F x) {
  F a = f_least(f_splat(5.091168824543142f), f_abs(x)), a2 = a * a;
  F r_even = POLY3(a2, f_splat(0x1.9a5886p-16f), -0x1.25027ap-12f, -0x1.aed25ap-5f, -0x1.26aef8p+0f);
  F r_odd = POLY3(a2, f_splat(-0x1.981c36p-20f), -0x1.fa0960p-14f, 0x1.d98e7ep-8f, 0x1.0c74b8p-2f);
  F r = a * f_fma(r_odd, a, r_even);
  F exponent = f_most(f_splat(-150), f_fma(-(x * x), f_splat(0.721347520444481704f), r)), n = f_round(exponent);
  F fraction = exponent - n, square = fraction * fraction;
  F even = POLY2(square, f_splat(0x1.3d0c52p-8f), 0x1.ebf918p-4f, 0x1.000002p-1f);
  F odd = POLY2(square, f_splat(0x1.5c08dcp-11f), 0x1.c6b6e6p-6f, 0x1.62e428p-2f);
  F tail = f_scale(f_fma(odd, fraction, even), n);
  return f_select(x < 0, tail, f_splat(1) - tail);
}

// Rounded to bf16 by itself: the lower half is zero.
INLINE F f_gelu_of_bf16(F x) {
  F t = f_least(f_splat(5.1f), f_abs(x));
  F q = POLY5(t, f_splat(-0x1.12e330p-12f), 0x1.55726ep-8f, -0x1.78ad12p-5f, 0x1.04022cp-2f, -0x1.25c338p+0f, -0x1.001078p+0f);
  F exponent = f_most(f_splat(-150), f_fma(-(x * x), f_splat(0.721347520444481704f), q)), n = f_floor(exponent);
  F power = POLY3(exponent - n, f_splat(0x1.3f9696p-4f), 0x1.cefc62p-3f, 0x1.644448p-1f, 0x1.fff634p-1f);
  F y = f_fma(-t, f_scale(power, n), f_most(f_splat(-0.0f), x));
  return (F)(((I)y + 0x8000) & -0x10000);
}

// ---- bf16: the upper half of an f32, rounded to the nearest even.
INLINE F f_from_bf16(H h) { return (F)(__builtin_convertvector(h, U) << 16); }
INLINE H f_to_bf16(F x) {
  U u = (U)x, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  U nan = (U)((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((nan & ((u >> 16) | 0x40u)) | (~nan & rounded), H);
}
INLINE F f_as_bf16(F x) { return f_from_bf16(f_to_bf16(x)); }

// ---- memory. Whole vectors; the last elements of a row go through buffers of one vector each. With a step, `left` lanes.
INLINE void copy(u8* to, const u8* from, long bytes) {
  for (long b = 0; b < bytes; ++b) to[b] = from[b];
}
#define LOAD(name, T, V, C, lanes)                          \
  INLINE V name(const T* p) {                               \
    V r;                                                    \
    for (int l = 0; l < lanes; ++l) r[l] = (C)p[l];         \
    return r;                                               \
  }                                                         \
  INLINE V name##_by(const T* p, long step, long left) {    \
    V r = {};                                               \
    for (int l = 0; l < left; ++l) r[l] = (C)p[l * step];   \
    return r;                                               \
  }
LOAD(f_load_f32, float, F, float, LF)
LOAD(f_load_f64, double, F, float, LF)
LOAD(f_load_i8, i8, F, float, LF)
LOAD(f_load_u8, u8, F, float, LF)
LOAD(f_load_i16, i16, F, float, LF)
LOAD(f_load_i32, i32, F, float, LF)
LOAD(f_load_i64, i64, F, float, LF)
LOAD(d_load_f64, double, D, double, LD)
LOAD(d_load_f32, float, D, double, LD)
LOAD(d_load_i8, i8, D, double, LD)
LOAD(d_load_u8, u8, D, double, LD)
LOAD(d_load_i16, i16, D, double, LD)
LOAD(d_load_i32, i32, D, double, LD)
LOAD(d_load_i64, i64, D, double, LD)
LOAD(load_h, u16, H, u16, LF)
LOAD(load_bf, u8, BF, u8, LF)
LOAD(load_bd, u8, BD, u8, LD)
INLINE F f_load_bf16(const u16* p) { return f_from_bf16(load_h(p)); }
INLINE F f_load_bf16_by(const u16* p, long step, long left) { return f_from_bf16(load_h_by(p, step, left)); }
INLINE D d_load_bf16(const u16* p) {
  D r;
  for (int l = 0; l < LD; ++l) r[l] = ((union { unsigned u; float f; }){(unsigned)p[l] << 16}).f;
  return r;
}
INLINE D d_load_bf16_by(const u16* p, long step, long left) {
  u16 q[LD] = {};
  for (int l = 0; l < left; ++l) q[l] = p[l * step];
  return d_load_bf16(q);
}
INLINE I f_load_bool(const u8* p) { return __builtin_convertvector(load_bf(p), I) != 0; }
INLINE I f_load_bool_by(const u8* p, long step, long left) { return __builtin_convertvector(load_bf_by(p, step, left), I) != 0; }
INLINE J d_load_bool(const u8* p) { return __builtin_convertvector(load_bd(p), J) != 0; }
INLINE J d_load_bool_by(const u8* p, long step, long left) { return __builtin_convertvector(load_bd_by(p, step, left), J) != 0; }
INLINE void f_store_f32(float* p, F r) { __builtin_memcpy(p, &r, sizeof r); }
INLINE void d_store_f64(double* p, D r) { __builtin_memcpy(p, &r, sizeof r); }
INLINE void f_store_bf16(u16* p, F x) {
  H r = f_to_bf16(x);
  __builtin_memcpy(p, &r, sizeof r);
}
INLINE void f_store_bool(u8* p, I m) {
  BF r = __builtin_convertvector(m & 1, BF);
  __builtin_memcpy(p, &r, sizeof r);
}
INLINE void d_store_bool(u8* p, J m) {
  BD r = __builtin_convertvector(m & 1, BD);
  __builtin_memcpy(p, &r, sizeof r);
}
