// Sums over the memory of several ranks, along the tree of Note [Order of sums] (vec/combine.h).
struct Sources {
  const void* from[64];
  i64 count;
  double factor, divisor;
};
template <class C>
__device__ __forceinline__ C scaled(C x, C by, bool scales) {
  return scales ? x * by : x;
}
// Two partial results of equal weight are added as soon as there are two, as a binary counter counts.
template <class T>
__device__ __forceinline__ Compute<T> sum_at(const Sources& s, i64 i) {
  typedef Compute<T> C;
  C levels[7];
  const bool scales = s.factor != 1;
  const C by = (C)s.factor;
  for (int r = 0; r < (int)s.count; ++r) {
    C value = scaled<C>(widen(((const T*)s.from[r])[i]), by, scales);
    int level = 0;
    for (int count = r; count & 1; count >>= 1) value = levels[level++] + value;
    levels[level] = value;
  }
  int level = 0, rest = (int)s.count;
  for (; (rest & 1) == 0; rest >>= 1) ++level;
  C value = levels[level];
  for (rest >>= 1, ++level; rest != 0; rest >>= 1, ++level) {
    if (rest & 1) value = levels[level] + value;
  }
  return value;
}
template <class T>
__global__ void sum_sources(const Sources s, T* out, i64 n) {
  typedef Compute<T> C;
  const bool divides = s.divisor != 1;
  FOR_EACH_ELEMENT(i, n) {
    const C value = sum_at<T>(s, i);
    out[i] = cast<T>(divides ? value / (C)s.divisor : value);
  }
}
// Adds two sources whose memory begins at multiples of 16 bytes; n is the number of whole packs.
template <class T>
__global__ void sum_two(const Sources s, T* out, i64 n) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const bool scales = s.factor != 1, divides = s.divisor != 1;
  const C by = (C)s.factor, divisor = (C)s.divisor;
  FOR_EACH_ELEMENT(i, n) {
    const Pack16<T> a = ((const Pack16<T>*)s.from[0])[i], b = ((const Pack16<T>*)s.from[1])[i];
    Pack16<T> y;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const C value = scaled<C>(widen(a.at[j]), by, scales) + scaled<C>(widen(b.at[j]), by, scales);
      y.at[j] = cast<T>(divides ? value / divisor : value);
    }
    ((Pack16<T>*)out)[i] = y;
  }
}
