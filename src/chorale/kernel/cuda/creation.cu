// Tensors out of nothing.
template <class T>
__global__ void count_up(T* out, i64 n, i64 whole, i64 first, i64 step, double real_first, double real_step) {
  FOR_EACH_ELEMENT(i, n)
  out[i] = whole ? cast<T>(first + i * step) : cast<T>(__dadd_rn(real_first, __dmul_rn((double)i, real_step)));
}
template <class T>
__global__ void spread_out(T* out, i64 n, double first, double last, double step) {
  FOR_EACH_ELEMENT(i, n) {
    out[i] = cast<T>(i < n / 2 || n == 1 ? __dadd_rn(first, __dmul_rn((double)i, step))
                                         : __dsub_rn(last, __dmul_rn((double)(n - 1 - i), step)));
  }
}
template <class T>
__global__ void identity(T* out, i64 rows, i64 columns) {
  FOR_EACH_ELEMENT(i, rows * columns) out[i] = cast<T>((i64)(i / columns == i % columns));
}
