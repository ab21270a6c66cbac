// Running sums and products along a dimension, and linear recurrences: [outer, length, inner], in the type S.
struct Scan {
  i64 lines, length, inner;
  i64 reverse, exclusive;
  __device__ __forceinline__ i64 at(i64 line, i64 i) const {
    return (line / inner * length + (reverse ? length - 1 - i : i)) * inner + line % inner;
  }
};
template <bool kProduct, class S>
__device__ __forceinline__ S joined(S a, S b) {
  return kProduct ? a * b : a + b;
}
// A warp per line, 32 elements at a time.
template <class T, class S, bool kProduct>
__global__ void scan(const T* x, T* y, const Scan s) {
  const int lane = threadIdx.x % 32;
  for (i64 line = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32; line < s.lines;
       line += (i64)gridDim.x * blockDim.x / 32) {
    S carry = kProduct ? S(1) : S(0);
    for (i64 first = 0; first < s.length; first += 32) {
      const i64 i = first + lane;
      S value = i < s.length ? (S)widen(x[s.at(line, i)]) : kProduct ? S(1) : S(0);
      for (int by = 1; by < 32; by *= 2) {
        const S before = __shfl_up_sync(0xffffffffu, value, by);
        if (lane >= by) value = joined<kProduct>(before, value);
      }
      const S whole = joined<kProduct>(carry, value);
      S shifted = __shfl_up_sync(0xffffffffu, whole, 1);
      if (lane == 0) shifted = carry;
      if (i < s.length) y[s.at(line, i)] = cast<T>(s.exclusive ? shifted : whole);
      carry = __shfl_sync(0xffffffffu, whole, 31);
    }
  }
}
// y[i] = state; state = b[i] + a[i] * state
template <class T, class S>
__global__ void recurrence(const T* a, const T* b, T* y, const Scan s) {
  FOR_EACH_ELEMENT(line, s.lines) {
    S state = 0;
    for (i64 i = 0; i < s.length; ++i) {
      const i64 at = s.at(line, i);
      const S factor = (S)widen(a[at]), term = (S)widen(b[at]);
      y[at] = cast<T>(state);
      state = term + factor * state;
    }
  }
}
