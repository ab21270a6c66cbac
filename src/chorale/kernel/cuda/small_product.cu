// Products of a few hundred thousand operations, in f32 and f64. A thread makes an element, or, where sums are long, a
// warp does: no tiles, no sums that are shared out and put together by another kernel.
template <class T>
struct Small {
  i64 m, n, k;
  i64 a_row, a_col, b_row, b_col, c_row;
  i64 batch, a_batch, b_batch, c_batch;
  const T *a, *b, *bias;
  T* c;
  double alpha, beta;
};
template <class T, bool kByWarps>
__global__ void __launch_bounds__(64, 4) small_product(const Small<T> p) {
  const u32 lane = kByWarps ? threadIdx.x % 32 : 0, step = kByWarps ? 32 : 1;
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, number = kByWarps ? thread / 32 : thread;
  const u32 m = (u32)p.m, n = (u32)p.n, row_of_all = number / n, column = number - row_of_all * n;
  const u32 which = row_of_all / m, row = row_of_all - which * m;
  if (which >= p.batch) return;
  const T* const a = p.a + which * p.a_batch + row * p.a_row;
  const T* const b = p.b + which * p.b_batch + column * p.b_col;
  // Many loads at once: each takes as long as dozens of products.
  constexpr u32 kAtOnce = kByWarps ? 16 : 32;
  const u32 k = (u32)p.k;
  T sum = 0;
  for (u32 first = 0; first < k; first += step * kAtOnce) {
    T x[kAtOnce], y[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 j = first + i * step + lane;
      x[i] = j < k ? a[j * p.a_col] : T(0);
      y[i] = j < k ? b[j * p.b_row] : T(0);
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) sum = ::fma(x[i], y[i], sum);
  }
  if constexpr (kByWarps) {
    for (int by = 16; by > 0; by /= 2) sum += shuffled_down(sum, by);
    if (lane != 0) return;
  }
  T* const c = p.c + which * p.c_batch + row * p.c_row + column;
  T result = (T)p.alpha * sum;
  if (p.beta != 0) result = ::fma((T)p.beta, *c, result);
  *c = p.bias ? result + p.bias[column] : result;
}
