// Random numbers with the words of the CPU: element i of the whole has the same ones wherever it is drawn.
template <class T>
__global__ void uniform(T* out, i64 n, const Drawn d, double low, double high) {
  FOR_EACH_ELEMENT(i, n) {
    const u64 at = (u64)whole_index(d, i);
    if constexpr (IsSame<T, float>::value) {
      const float from = (float)low, range = (float)(high - low);
      const float value = __fadd_rn(from, __fmul_rn(range, (float)(word_of(d, at) >> 8) * 0x1p-24f));
      const float last = ::nextafterf((float)high, from);
      out[i] = value < last ? value : last;
    } else if constexpr (IsSame<T, double>::value) {
      const u64 word = (u64)word_of(d, 2 * at) << 32 | word_of(d, 2 * at + 1);
      out[i] = __dadd_rn(low, __dmul_rn(high - low, (double)(word >> 11) * 0x1p-53));
    } else {
      out[i] = cast<T>((float)__dadd_rn(low, __dmul_rn(high - low, (double)((float)(word_of(d, at) >> 8) * 0x1p-24f))));
    }
  }
}
// Box and Muller: elements 2i and 2i + 1 of the whole come from one pair of uniform numbers.
template <class T>
__global__ void normal(T* out, i64 n, const Drawn d, double mean, double deviation) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, n) {
    const u64 at = (u64)whole_index(d, i), pair = at / 2 * 2;
    C u, w;
    if constexpr (IsSame<T, double>::value) {
      u = (double)(((u64)word_of(d, 2 * pair) << 32 | word_of(d, 2 * pair + 1)) >> 11) * 0x1p-53;
      w = (double)(((u64)word_of(d, 2 * pair + 2) << 32 | word_of(d, 2 * pair + 3)) >> 11) * 0x1p-53;
    } else {
      u = (float)(word_of(d, pair) >> 8) * 0x1p-24f;
      w = (float)(word_of(d, pair + 1) >> 8) * 0x1p-24f;
    }
    const C radius = ::sqrt(::log(C(1) - u) * C(-2)), angle = C(2 * 3.14159265358979323846) * w;
    const C scale = (C)deviation * radius;
    out[i] = cast<T>((C)mean + scale * (at % 2 == 0 ? ::cos(angle) : ::sin(angle)));
  }
}
template <class T>
__global__ void random_integer(T* out, i64 n, const Drawn d, i64 low, u64 range) {
  FOR_EACH_ELEMENT(i, n) {
    const u64 at = (u64)whole_index(d, i), word = (u64)word_of(d, 2 * at) << 32 | word_of(d, 2 * at + 1);
    out[i] = cast<T>((i64)((u64)low + __umul64hi(word, range)));
  }
}
template <class T>
__global__ void bernoulli(const T* p, T* out, i64 n, const Drawn d, Fault* fault, i64 row) {
  FOR_EACH_ELEMENT(i, n) {
    const double chance = (double)widen(p[i]);
    if (!(chance >= 0 && chance <= 1)) report(fault, (i32)row, i, (i64)chance, 1);
    out[i] = cast<T>((i64)((double)((float)(word_of(d, (u64)whole_index(d, i)) >> 8) * 0x1p-24f) < chance));
  }
}
// Four words are made at once where they belong together.
template <class T>
__global__ void dropout(const T* x, T* y, i64 n, const Drawn d, u32 threshold, double scale) {
  typedef Compute<T> C;
  if (d.placed) {
    FOR_EACH_ELEMENT(i, n) {
      y[i] = cast<T>(word_of(d, (u64)whole_index(d, i)) < threshold ? C(0) : widen(x[i]) * (C)scale);
    }
    return;
  }
  FOR_EACH_ELEMENT(block, (n + 3) / 4) {
    u32 words[4];
    philox((u64)d.stretch[0], (u64)d.stretch[d.step] + (u64)block, words);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const i64 i = 4 * block + k;
      if (i < n) y[i] = cast<T>(words[k] < threshold ? C(0) : widen(x[i]) * (C)scale);
    }
  }
}
