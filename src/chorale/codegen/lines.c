// ---- What blocks are written in (Note [Blocks]): lines of f32, products of small matrices, updates. Sums are added up in
// the order of the eager loops (vec/reduce-inl.h, kernel/cpu/product/small_product.cc).
#if defined(__AVX512F__) && !defined(__clang__)
#define LANES(n) ((unsigned short)((n) >= 16 ? 0xffff : (1u << (n)) - 1))
INLINE F f_load_first(const float* p, long n) { return (F)__builtin_ia32_loadups512_mask(p, (F){}, LANES(n)); }
INLINE void f_store_first(float* p, F x, long n) { __builtin_ia32_storeups512_mask(p, x, LANES(n)); }
#else
INLINE F f_load_first(const float* p, long n) {
  F r = {};
  if (n >= LF) __builtin_memcpy(&r, p, sizeof r);
  else __builtin_memcpy(&r, p, n * sizeof(float));
  return r;
}
INLINE void f_store_first(float* p, F x, long n) {
  if (n >= LF) __builtin_memcpy(p, &x, sizeof x);
  else __builtin_memcpy(p, &x, n * sizeof(float));
}
#endif
#if defined(__AVX512F__) && !defined(__clang__)
INLINE int any(I mask) { return __builtin_ia32_ptestmd512(mask, mask, (unsigned short)-1) != 0; }
#else
INLINE int any(I mask) {
  int r = 0;
  for (int l = 0; l < LF; ++l) r |= mask[l];
  return r;
}
#endif
// The first n lanes of x, those of y behind them.
INLINE F f_first(F x, F y, long n) {
  I lane;
  for (int l = 0; l < LF; ++l) lane[l] = l;
  return f_select(lane < (int)n, x, y);
}

// ---- all lanes of a vector, as a tree: those of each half come to the other half, turned round
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if LF == 16
#define TURN_16(v) MIX(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define TURN_8(v) MIX(v, v, 7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8)
#define TURN_4(v) MIX(v, v, 3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12)
#define TURN_2(v) MIX(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#elif LF == 8
#define TURN_8(v) MIX(v, v, 7, 6, 5, 4, 3, 2, 1, 0)
#define TURN_4(v) MIX(v, v, 3, 2, 1, 0, 7, 6, 5, 4)
#define TURN_2(v) MIX(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define TURN_4(v) MIX(v, v, 3, 2, 1, 0)
#define TURN_2(v) MIX(v, v, 1, 0, 3, 2)
#endif
#if LF == 16
#define FOLD(v, combine) v = combine(v, TURN_16(v)), v = combine(v, TURN_8(v)), v = combine(v, TURN_4(v)), v = combine(v, TURN_2(v))
#elif LF == 8
#define FOLD(v, combine) v = combine(v, TURN_8(v)), v = combine(v, TURN_4(v)), v = combine(v, TURN_2(v))
#else
#define FOLD(v, combine) v = combine(v, TURN_4(v)), v = combine(v, TURN_2(v))
#endif
#define TREE(name, combine) \
  INLINE float name(F v) {  \
    FOLD(v, combine);       \
    return v[0];            \
  }
INLINE F f_add(F a, F b) { return a + b; }
TREE(f_add_lanes, f_add)
TREE(f_most_lanes, f_most)

// ---- one line of n elements, at most 128 vectors: eight vectors side by side where there are as many
#define LINE(start, step, combine, lanes)                                                      \
  {                                                                                                  \
    F s = f_splat(start);                                                                            \
    long i = 0;                                                                                      \
    if (n >= 8 * LF) {                                                                               \
      F s0 = s, s1 = s, s2 = s, s3 = s, s4 = s, s5 = s, s6 = s, s7 = s;                              \
      for (; i + 8 * LF <= n; i += 8 * LF) {                                                         \
        s0 = step(s0, i), s1 = step(s1, i + LF), s2 = step(s2, i + 2 * LF), s3 = step(s3, i + 3 * LF); \
        s4 = step(s4, i + 4 * LF), s5 = step(s5, i + 5 * LF), s6 = step(s6, i + 6 * LF);             \
        s7 = step(s7, i + 7 * LF);                                                                   \
      }                                                                                              \
      s = combine(combine(combine(s0, s1), combine(s2, s3)), combine(combine(s4, s5), combine(s6, s7))); \
    }                                                                                                \
    for (; i + LF <= n; i += LF) s = step(s, i);                                                     \
    if (i < n) s = f_first(step(s, i), s, n - i);                                                    \
    return lanes(s);                                                                                 \
  }
#define AT(i) f_load_first(x + (i), n - (i))
INLINE float f_line_sum(const float* x, long n) {
#define STEP(s, i) ((s) + AT(i))
  LINE(0, STEP, f_add, f_add_lanes)
#undef STEP
}
// The largest element, or NaN where there is one.
INLINE float f_line_max(const float* x, long n) {
  F s = f_splat(-__builtin_inff());
  I is_nan = {};
  for (long i = 0; i < n; i += LF) {
    F v = i + LF <= n ? AT(i) : f_first(AT(i), s, n - i);
    is_nan |= v != v;
    s = f_most(v, s);
  }
  return any(is_nan) ? __builtin_nanf("") : f_most_lanes(s);
}
INLINE float f_line_sum_exp(const float* x, long n, float shift) {
#define STEP(s, i) ((s) + f_exp(AT(i) - f_splat(shift)))
  LINE(0, STEP, f_add, f_add_lanes)
#undef STEP
}

INLINE float f_line_sum_squares(const float* x, long n, float mean) {
#define STEP(s, i) ({ F d = AT(i) - f_splat(mean); f_fma(d, d, s); })
  LINE(0, STEP, f_add, f_add_lanes)
#undef STEP
}
INLINE float f_line_dot(const float* x, const float* y, long n) {
#define STEP(s, i) f_fma(AT(i), f_load_first(y + (i), n - (i)), s)
  LINE(0, STEP, f_add, f_add_lanes)
#undef STEP
}
// The sum of y = exp(x - shift).
INLINE float f_line_exp(const float* x, float* y, long n, float shift) {
#define STEP(s, i) ({ F e = f_exp(AT(i) - f_splat(shift)); f_store_first(y + (i), e, n - (i)); (s) + e; })
  LINE(0, STEP, f_add, f_add_lanes)
#undef STEP
}
#define EACH_VECTOR for (long i = 0; i < n; i += LF)
#define OF(p) f_load_first(p + i, n - i)
#define PUT(p, value) f_store_first(p + i, value, n - i)
INLINE void f_line_softmax(const float* x, float* y, long n) {
  F factor = f_splat(1 / f_line_exp(x, y, n, f_line_max(x, n)));
  EACH_VECTOR PUT(y, OF(y) * factor);
}
INLINE void f_line_log_softmax(const float* x, float* y, long n) {
  float largest = f_line_max(x, n);
  F shift = f_splat(largest), log_sum = f_splat(__builtin_logf(f_line_sum_exp(x, n, largest)));
  EACH_VECTOR PUT(y, OF(x) - shift - log_sum);
}
INLINE void f_line_softmax_backward(const float* dy, const float* y, float* dx, long n) {
  F sum = f_splat(f_line_dot(dy, y, n));
  EACH_VECTOR PUT(dx, OF(y) * (OF(dy) - sum));
}
INLINE void f_line_log_softmax_backward(const float* dy, const float* y, float* dx, long n) {
  F sum = f_splat(f_line_sum(dy, n));
  EACH_VECTOR PUT(dx, f_fma(-f_exp(OF(y)), sum, OF(dy)));
}
INLINE void f_line_normalize(const float* x, const float* w, const float* b, float* y, float mean, float rstd, long n) {
  EACH_VECTOR {
    F z = (OF(x) - f_splat(mean)) * f_splat(rstd);
    PUT(y, w && b ? f_fma(z, OF(w), OF(b)) : w ? z * OF(w) : b ? z + OF(b) : z);
  }
}
INLINE void f_line_layer_norm(const float* x, const float* w, const float* b, float* y, float* mean, float* rstd, float eps, long n) {
  *mean = f_line_sum(x, n) / (float)n;
  *rstd = 1 / __builtin_sqrtf(f_line_sum_squares(x, n, *mean) / (float)n + eps);
  f_line_normalize(x, w, b, y, *mean, *rstd, n);
}
INLINE void f_line_rms_norm(const float* x, const float* w, float* y, float* rstd, float eps, long n) {
  *rstd = 1 / __builtin_sqrtf(f_line_sum_squares(x, n, 0) / (float)n + eps);
  f_line_normalize(x, w, 0, y, 0, *rstd, n);
}

// ---- sums of columns: `wide` lines side by side where columns are few, as the eager sum does
INLINE void f_column_sums(const float* x, long m, long n, float* y) {
  long wide = n < 64 ? 64 / n : 1, beside = wide > 1 && m >= 2 * wide ? m / wide * wide : 0;
  for (long j = 0; j < n; j += LF) {
    F s = {};
    for (long w = 0; w < (beside ? wide : 0); ++w) {
      F part = {};
      for (long i = w; i < beside; i += wide) part += f_load_first(x + i * n + j, n - j);
      s += part;
    }
    for (long i = beside; i < m; ++i) s += f_load_first(x + i * n + j, n - j);
    f_store_first(y + j, s, n - j);
  }
}

// ---- products: tiles of some lines by two vectors of columns, which stay in registers while `depth` runs
#define EACH_1(X) X(0)
#define EACH_2(X) EACH_1(X) X(1)
#define EACH_4(X) EACH_2(X) X(2) X(3)
#define EACH_8(X) EACH_4(X) X(4) X(5) X(6) X(7)
#define BEGIN_LINE(r) F s##r = {}, t##r = {};
#define ADD_LINE(r)                        \
  {                                        \
    F v = f_splat(a[r * a_row]);           \
    s##r = f_fma(v, b0, s##r);             \
    if (n > LF) t##r = f_fma(v, b1, t##r); \
  }
#define END_LINE(r)                                                          \
  f_store_first(c + r * c_row, s##r + bias0, n);                             \
  if (n > LF) f_store_first(c + r * c_row + LF, t##r + bias1, n - LF);
#define TILE(lines)                                                                                                  \
  INLINE void f_tile_##lines(long depth, const float* a, long a_row, long a_col, const float* b, long b_row, float* c, \
                             long c_row, const float* bias, long n) {                                                \
    EACH_##lines(BEGIN_LINE) for (long k = 0; k < depth; ++k, a += a_col, b += b_row) {                              \
      F b0 = f_load_first(b, n), b1 = n > LF ? f_load_first(b + LF, n - LF) : b0;                                    \
      EACH_##lines(ADD_LINE)                                                                                         \
    }                                                                                                                \
    F bias0 = bias ? f_load_first(bias, n) : (F){}, bias1 = bias && n > LF ? f_load_first(bias + LF, n - LF) : (F){}; \
    EACH_##lines(END_LINE)                                                                                           \
  }
TILE(1)
TILE(2)
TILE(4)
TILE(8)
INLINE void f_product(long m, long n, long depth, const float* a, long a_row, long a_col, const float* b, long b_row, float* c,
                      const float* bias) {
#define LINES_OF(lines)                                                                                            \
  for (; i + lines <= m; i += lines)                                                                               \
    f_tile_##lines(depth, a + i * a_row, a_row, a_col, b + j, b_row, c + i * n + j, n, bias ? bias + j : bias, left);
  for (long j = 0; j < n; j += 2 * LF) {
    long left = n - j < 2 * LF ? n - j : 2 * LF, i = 0;
#if LF == 16
    LINES_OF(8)
#endif
    LINES_OF(4)
    LINES_OF(2)
    LINES_OF(1)
  }
}
// to[j][i] = from[i][j], m lines of n; squares of four.
typedef float Q __attribute__((vector_size(16), aligned(4)));
INLINE void f_transpose(const float* from, long m, long n, long stride, float* to) {
  long i = 0;
  for (; i + 4 <= m; i += 4) {
    long j = 0;
    for (; j + 4 <= n; j += 4) {
      const float* x = from + i * stride + j;
      Q a = *(const Q*)x, b = *(const Q*)(x + stride), c = *(const Q*)(x + 2 * stride), d = *(const Q*)(x + 3 * stride);
      Q ac = MIX(a, c, 0, 4, 1, 5), bd = MIX(b, d, 0, 4, 1, 5), ac2 = MIX(a, c, 2, 6, 3, 7), bd2 = MIX(b, d, 2, 6, 3, 7);
      float* y = to + j * m + i;
      *(Q*)y = MIX(ac, bd, 0, 4, 1, 5);
      *(Q*)(y + m) = MIX(ac, bd, 2, 6, 3, 7);
      *(Q*)(y + 2 * m) = MIX(ac2, bd2, 0, 4, 1, 5);
      *(Q*)(y + 3 * m) = MIX(ac2, bd2, 2, 6, 3, 7);
    }
    for (; j < n; ++j) {
      for (long l = 0; l < 4; ++l) to[j * m + i + l] = from[(i + l) * stride + j];
    }
  }
  for (; i < m; ++i) {
    for (long j = 0; j < n; ++j) to[j * m + i] = from[i * stride + j];
  }
}

// ---- losses over classes
INLINE long targets_fit(const i64* target, long n, long classes, i64 ignored) {
  long wrong = 0;
  for (long i = 0; i < n; ++i) wrong |= target[i] != ignored && (target[i] < 0 || target[i] >= classes);
  return !wrong;
}
INLINE double targets_that_count(const i64* target, long n, i64 ignored) {
  double count = 0;
  for (long i = 0; i < n; ++i) count += target[i] != ignored;
  return count;
}
// The loss of each line, and the logarithm of the sum of the exponentials.
INLINE void f_losses(const float* x, const i64* target, long n, long classes, i64 ignored, float* loss, double* lse) {
  for (long i = 0; i < n; ++i) {  // without a call in between, so that lines overlap
    float largest = f_line_max(x + i * classes, classes);
    loss[i] = __builtin_isinf(largest) ? 0 : largest;
    lse[i] = f_line_sum_exp(x + i * classes, classes, loss[i]);
  }
  for (long i = 0; i < n; ++i) {
    lse[i] = loss[i] + __builtin_log(lse[i]);
    loss[i] = target[i] != ignored ? (float)(lse[i] - x[i * classes + target[i]]) : 0;
  }
}
// See Note [Exact logsumexp].
INLINE void f_loss_gradient(const float* x, const i64* target, long n, long classes, i64 ignored, const double* lse, float g,
                            float* dx) {
  for (long i = 0; i < n; ++i, x += classes, dx += classes) {
    float shift = (float)lse[i];
    double rest = (double)shift - lse[i], factor = __builtin_isfinite(lse[i]) ? 1 + rest * (1 + rest / 2) : 1;
    float scale = (float)(g * factor);
    for (long j = 0; j < classes; j += LF) {
      F e = f_exp(f_load_first(x + j, classes - j) - f_splat(shift));
      F d = f_fma(e, f_splat(scale), f_splat(g * -0.0f));
      f_store_first(dx + j, target[i] != ignored ? d : (F){}, classes - j);
    }
    if (target[i] != ignored) dx[target[i]] -= g;
  }
}

// ---- updates of parameters (vec/update.cc)
INLINE void f_adam(const float* w, const float* g, const float* m, const float* v, float* w_to, float* m_to, float* v_to, long n,
                   float sign, float weight_decay, float keep, float rate, float gain1, float decay2, float gain2, float root_scale,
                   float eps) {
  for (long i = 0; i < n; i += LF) {
    F weight = f_load_first(w + i, n - i), gradient = f_splat(sign) * f_load_first(g + i, n - i);
    F first = f_load_first(m + i, n - i), second = f_load_first(v + i, n - i);
    gradient = f_fma(f_splat(weight_decay), weight, gradient);
    weight = f_splat(keep) * weight;
    first = f_fma(f_splat(gain1), gradient - first, first);
    second = f_fma(f_splat(decay2), second, f_splat(gain2) * (gradient * gradient));
    F divisor = f_fma(f_sqrt(second), f_splat(root_scale), f_splat(eps));
    f_store_first(m_to + i, first, n - i);
    f_store_first(v_to + i, second, n - i);
    f_store_first(w_to + i, f_fma(-f_splat(rate), first / divisor, weight), n - i);
  }
}
INLINE void f_sgd(const float* w, const float* g, const float* b, float* w_to, float* b_to, long n, float sign, float weight_decay,
                  float rate, float momentum, float gain, long nesterov) {
  for (long i = 0; i < n; i += LF) {
    F weight = f_load_first(w + i, n - i), gradient = f_splat(sign) * f_load_first(g + i, n - i);
    gradient = f_fma(f_splat(weight_decay), weight, gradient);
    F step = gradient;
    if (b) {
      F moved = f_fma(f_splat(momentum), f_load_first(b + i, n - i), f_splat(gain) * gradient);
      f_store_first(b_to + i, moved, n - i);
      step = nesterov ? f_fma(f_splat(momentum), moved, gradient) : moved;
    }
    f_store_first(w_to + i, f_fma(-f_splat(rate), step, weight), n - i);
  }
}
