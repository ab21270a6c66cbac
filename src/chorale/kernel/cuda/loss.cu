// Losses of differences d = x - y (Difference in kernel/nn_attrs.h), and binary cross entropy.
template <int kKind, class C>
__device__ __forceinline__ C loss_of(C d, C bound) {
  const C a = d < 0 ? -d : d;
  if constexpr (kKind == 0) return d * d;
  if constexpr (kKind == 1) return a;
  if constexpr (kKind == 2) return a < bound ? d * d * (C(1) / bound) * C(0.5) : a - bound / 2;
  return a <= bound ? d * d * C(0.5) : bound * (a - bound / 2);
}
template <int kKind, class C>
__device__ __forceinline__ C slope_of(C d, C bound) {
  const C a = d < 0 ? -d : d, sign = d > 0 ? C(1) : d < 0 ? C(-1) : d;
  if constexpr (kKind == 0) return d + d;
  if constexpr (kKind == 1) return sign;
  if constexpr (kKind == 2) return a < bound ? d * (C(1) / bound) : sign;
  return a <= bound ? d : bound * sign;
}
template <class T, int kKind>
__global__ void difference_each(const T* x, const T* y, T* out, i64 n, double bound) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, n) out[i] = cast<T>(loss_of<kKind, C>(widen(x[i]) - widen(y[i]), (C)bound));
}
// A sum per block, then one block for all of them.
template <class T, int kKind>
__global__ void difference_sums(const T* x, const T* y, Compute<T>* sums, i64 n, double bound) {
  typedef Compute<T> C;
  C sum = 0;
  FOR_EACH_ELEMENT(i, n) sum += loss_of<kKind, C>(widen(x[i]) - widen(y[i]), (C)bound);
  sum = over_block<Plus>(sum, C(0));
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
template <class T>
__global__ void total_of_sums(const Compute<T>* sums, T* out, i64 count, double divisor) {
  typedef Compute<T> C;
  C sum = 0;
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += sums[i];
  sum = over_block<Plus>(sum, C(0));
  if (threadIdx.x == 0) *out = cast<T>(sum / (C)divisor);
}
// dloss has one element, or one per element of x where `each` says so.
template <class T, int kKind>
__global__ void difference_backward(const Compute<T>* dloss, const T* x, const T* y, T* dx, i64 n, double bound,
                                    double divisor, i64 each) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, n) {
    const C scale = dloss[each ? i : 0] / (C)divisor;
    dx[i] = cast<T>(scale * slope_of<kKind, C>(widen(x[i]) - widen(y[i]), (C)bound));
  }
}
template <class T>
__global__ void binary_cross_entropy(const T* x, const T* target, T* out, i64 n, Fault* fault, i64 row) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, n) {
    const C p = widen(x[i]), t = widen(target[i]);
    if (p < 0 || p > 1) report(fault, (i32)row, i, 0, -1);
    const C log_p = ::log(p), log_rest = ::log1p(-p);
    // NaN stays.
    const C a = log_p < C(-100) ? C(-100) : log_p, b = log_rest < C(-100) ? C(-100) : log_rest;
    out[i] = cast<T>((t - C(1)) * b - t * a);
  }
}

// ---- group norm: a group is a row of memory, [samples, groups, each, area]

struct Groups {
  i64 rows, groups, each, area;
};
template <class T>
__global__ void group_norm(const T* x, const Compute<T>* weight, const Compute<T>* bias, T* y, Compute<T>* means,
                           Compute<T>* rstds, const Groups g, double eps) {
  typedef Compute<T> C;
  const i64 n = g.each * g.area;
  for (i64 row = blockIdx.x; row < g.rows; row += gridDim.x) {
    const T* const from = x + row * n;
    C sum = 0, squares = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += widen(from[i]);
    const C mean = over_block<Plus>(sum, C(0)) / (C)n;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) squares += (widen(from[i]) - mean) * (widen(from[i]) - mean);
    const C rstd = C(1) / ::sqrt(over_block<Plus>(squares, C(0)) / (C)n + (C)eps);
    if (threadIdx.x == 0) {
      means[row] = mean;
      rstds[row] = rstd;
    }
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
      const i64 channel = row % g.groups * g.each + i / g.area;
      const C z = (widen(from[i]) - mean) * rstd * (weight ? weight[channel] : C(1));
      y[row * n + i] = cast<T>(z + (bias ? bias[channel] : C(0)));
    }
  }
}
// The sums of dy and of dy z for each sample and channel. A block each.
template <class T>
__global__ void group_norm_sums(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* rstds,
                                Compute<T>* sums, const Groups g) {
  typedef Compute<T> C;
  const i64 lines = g.rows * g.each;
  for (i64 line = blockIdx.x; line < lines; line += gridDim.x) {
    const C mean = means[line / g.each], rstd = rstds[line / g.each];
    C sum = 0, dot = 0;
    for (i64 i = threadIdx.x; i < g.area; i += blockDim.x) {
      const C slope = widen(dy[line * g.area + i]);
      sum += slope;
      dot += slope * (widen(x[line * g.area + i]) - mean) * rstd;
    }
    sum = over_block<Plus>(sum, C(0));
    dot = over_block<Plus>(dot, C(0));
    if (threadIdx.x == 0) {
      sums[2 * line] = sum;
      sums[2 * line + 1] = dot;
    }
  }
}
template <class T>
__global__ void group_norm_backward(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* rstds,
                                    const Compute<T>* weight, const Compute<T>* sums, T* dx, const Groups g) {
  typedef Compute<T> C;
  const i64 n = g.each * g.area;
  for (i64 row = blockIdx.x; row < g.rows; row += gridDim.x) {
    const i64 channels = row % g.groups * g.each;
    C a = 0, b = 0;
    for (i64 k = 0; k < g.each; ++k) {
      const C w = weight ? weight[channels + k] : C(1);
      a += w * sums[2 * (row * g.each + k)];
      b += w * sums[2 * (row * g.each + k) + 1];
    }
    a /= (C)n;
    b /= (C)n;
    const C mean = means[row], rstd = rstds[row];
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
      const C w = weight ? weight[channels + i / g.area] : C(1);
      const C z = (widen(x[row * n + i]) - mean) * rstd;
      dx[row * n + i] = cast<T>((w * widen(dy[row * n + i]) - a - z * b) * rstd);
    }
  }
}
template <class C>
__global__ void group_norm_totals(const C* sums, C* dweight, C* dbias, i64 samples, i64 channels) {
  FOR_EACH_ELEMENT(c, channels) {
    double sum = 0, dot = 0;
    for (i64 s = 0; s < samples; ++s) {
      sum += (double)sums[2 * (s * channels + c)];
      dot += (double)sums[2 * (s * channels + c) + 1];
    }
    dbias[c] = (C)sum;
    dweight[c] = (C)dot;
  }
}
