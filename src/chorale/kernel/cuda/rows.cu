// Kernels that work on lines of a tensor, a block each: softmax, normalisation, cross entropy.
struct Lines {  // [outer, length, inner]; a line's elements are `inner` apart
  i64 count, length, inner;
};
__device__ __forceinline__ i64 first_of(const Lines& l, i64 line) {
  return line / l.inner * l.length * l.inner + line % l.inner;
}

template <class T, bool kLog>
__global__ void softmax(const T* x, T* y, const Lines l) {
  typedef Compute<T> C;
  for (i64 line = blockIdx.x; line < l.count; line += gridDim.x) {
    const i64 first = first_of(l, line);
    C most = -C(1) / C(0);
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) most = Larger::of(most, widen(x[first + j * l.inner]));
    most = over_block<Larger>(most, -C(1) / C(0));
    C sum = 0;
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) sum += ::exp(widen(x[first + j * l.inner]) - most);
    sum = over_block<Plus>(sum, C(0));
    const C log_sum = ::log(sum), scale = C(1) / sum;
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) {
      const C shifted = widen(x[first + j * l.inner]) - most;
      y[first + j * l.inner] = cast<T>(kLog ? shifted - log_sum : ::exp(shifted) * scale);
    }
  }
}
template <class T, bool kLog>
__global__ void softmax_backward(const T* dy, const T* y, T* dx, const Lines l) {
  typedef Compute<T> C;
  for (i64 line = blockIdx.x; line < l.count; line += gridDim.x) {
    const i64 first = first_of(l, line);
    C sum = 0;
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) {
      const i64 at = first + j * l.inner;
      sum += kLog ? widen(dy[at]) : widen(dy[at]) * widen(y[at]);
    }
    sum = over_block<Plus>(sum, C(0));
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) {
      const i64 at = first + j * l.inner;
      const C g = widen(dy[at]), p = widen(y[at]);
      dx[at] = cast<T>(kLog ? g - ::exp(p) * sum : p * (g - sum));
    }
  }
}

// ---- layer norm; kCentered is false for root mean squares

template <class T, bool kCentered>
__global__ void normalize(const T* x, const Compute<T>* weight, const Compute<T>* bias, T* y, Compute<T>* means,
                          Compute<T>* rstds, i64 rows, i64 n, double eps) {
  typedef Compute<T> C;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const from = x + row * n;
    C mean = 0;
    if (kCentered) {
      for (i64 j = threadIdx.x; j < n; j += blockDim.x) mean += widen(from[j]);
      mean = over_block<Plus>(mean, C(0)) / (C)n;
    }
    C squares = 0;
    for (i64 j = threadIdx.x; j < n; j += blockDim.x) {
      const C d = widen(from[j]) - mean;
      squares += d * d;
    }
    squares = over_block<Plus>(squares, C(0));
    const C rstd = C(1) / ::sqrt(squares / (C)n + (C)eps);
    if (threadIdx.x == 0) {
      if (kCentered) means[row] = mean;
      rstds[row] = rstd;
    }
    for (i64 j = threadIdx.x; j < n; j += blockDim.x) {
      C z = (widen(from[j]) - mean) * rstd;
      if (weight) z *= weight[j];
      if (bias) z += bias[j];
      y[row * n + j] = cast<T>(z);
    }
  }
}
template <class T, bool kCentered>
__global__ void normalize_backward(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* rstds,
                                   const Compute<T>* weight, T* dx, i64 rows, i64 n, double eps) {
  typedef Compute<T> C;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const C mean = kCentered ? means[row] : C(0), rstd = rstds[row];
    if (n == 1) {  // the terms below cancel, and rounding errors would be left
      const C slope = kCentered ? C(0) : (C)eps * rstd * rstd * rstd;
      if (threadIdx.x == 0) dx[row] = cast<T>(widen(dy[row]) * (weight ? weight[0] : C(1)) * slope);
      continue;
    }
    C sum = 0, dot = 0;
    for (i64 j = threadIdx.x; j < n; j += blockDim.x) {
      const C g = widen(dy[row * n + j]) * (weight ? weight[j] : C(1)), z = (widen(x[row * n + j]) - mean) * rstd;
      sum += g;
      dot += g * z;
    }
    sum = kCentered ? over_block<Plus>(sum, C(0)) / (C)n : C(0);
    dot = over_block<Plus>(dot, C(0)) / (C)n;
    for (i64 j = threadIdx.x; j < n; j += blockDim.x) {
      const C g = widen(dy[row * n + j]) * (weight ? weight[j] : C(1)), z = (widen(x[row * n + j]) - mean) * rstd;
      dx[row * n + j] = cast<T>((g - sum - z * dot) * rstd);
    }
  }
}
// Sums over rows, for the gradients of weight and bias: blocks of 32 columns and chunks of rows, then over chunks.
template <class T, bool kCentered>
__global__ void normalize_sums(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* rstds,
                               Compute<T>* partial, i64 rows, i64 n) {
  typedef Compute<T> C;
  __shared__ C parts[2][8][33];
  const i64 column = blockIdx.x * 32ll + threadIdx.x % 32;
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  const i64 step = (rows + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * step;
  const i64 end = begin + step < rows ? begin + step : rows;
  C weight = 0, bias = 0;
  if (column < n) {
    for (i64 row = begin + strip; row < end; row += 8) {
      const C g = widen(dy[row * n + column]);
      weight += g * (widen(x[row * n + column]) - (kCentered ? means[row] : C(0))) * rstds[row];
      bias += g;
    }
  }
  parts[0][strip][lane] = weight;
  parts[1][strip][lane] = bias;
  __syncthreads();
  if (strip < 2 && column < n) {
    C sum = 0;
    for (int k = 0; k < 8; ++k) sum += parts[strip][k][lane];
    partial[(blockIdx.y * 2ll + strip) * n + column] = sum;
  }
}
template <class C>
__global__ void normalize_totals(const C* partial, C* dweight, C* dbias, i64 chunks, i64 n) {
  FOR_EACH_ELEMENT(j, n) {
    C weight = 0, bias = 0;
    for (i64 k = 0; k < chunks; ++k) {
      weight += partial[2 * k * n + j];
      bias += partial[(2 * k + 1) * n + j];
    }
    dweight[j] = weight;
    if (dbias) dbias[j] = bias;
  }
}

// ---- losses of classes

struct Classes {
  i64 ignore_index, reduction, each;  // each: no reduction
  double smoothing;
  Fault* fault;
  i64 row;
};
// The sum of the weights of all classes, by all threads of a block.
template <class C>
__device__ C total_weight(const C* weight, i64 K) {
  if (!weight) return (C)K;
  C total = 0;
  for (i64 c = threadIdx.x; c < K; c += blockDim.x) total += weight[c];
  return over_block<Plus>(total, C(0));
}
template <class T>
__global__ void cross_entropy(const T* x, const i64* target, const Compute<T>* weight, double* lse, Compute<T>* losses,
                              const Lines l, const Classes c) {
  typedef Compute<T> C;
  const C infinite = C(1) / C(0), smooth = (C)c.smoothing, share = smooth / (C)l.length;
  const C all = c.smoothing > 0 ? total_weight(weight, l.length) : C(0);
  for (i64 line = blockIdx.x; line < l.count; line += gridDim.x) {
    const i64 first = first_of(l, line);
    // Running maximum and sum of exponentials: one pass over the line.
    C most = -infinite, sum = 0, weighted = 0;
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) {
      const C value = widen(x[first + j * l.inner]);
      if (value > most) {
        sum = sum * ::exp(most - value) + C(1);
        most = value;
      } else if (value == most && value == -infinite) {
        sum += C(0);
      } else {
        sum += ::exp(value - most);
      }
      if (c.smoothing > 0) weighted += value * (weight ? weight[j] : C(1));
    }
    const C top = over_block<Larger>(most, -infinite);
    sum = over_block<Plus>(most == -infinite ? sum * C(0) : sum * ::exp(most - top), C(0));
    if (c.smoothing > 0) weighted = over_block<Plus>(weighted, C(0));
    if (threadIdx.x == 0) {
      const double found = (double)top + ::log((double)sum);
      lse[line] = found;
      const i64 t = target[line];
      C loss = 0;
      if (t != c.ignore_index) {
        if (t < 0 || t >= l.length) {
          report(c.fault, (i32)c.row, line, t, l.length);
        } else {
          loss = (1 - smooth) * (weight ? weight[t] : C(1)) * (C)(found - (double)widen(x[first + t * l.inner]));
          if (c.smoothing > 0) loss += share * (C)((double)all * found - (double)weighted);
        }
      }
      losses[line] = loss;
    }
  }
}
// What a mean is divided by: the weights of the targets that count. One block, in a fixed order.
template <class C>
__global__ void weight_of_targets(const i64* target, const C* weight, double* total, i64 count, i64 K,
                                  i64 ignore_index) {
  double sum = 0;
#pragma unroll 8
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
    const i64 t = target[i];
    if (t != ignore_index && t >= 0 && t < K) sum += weight ? (double)weight[t] : 1.0;
  }
  sum = over_block<Plus>(sum, 0.0);
  if (threadIdx.x == 0) *total = sum;
}
template <class T>
__global__ void loss_total(const Compute<T>* losses, const double* divisor, T* out, i64 count) {
  typedef Compute<T> C;
  C sum = 0;
#pragma unroll 8
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += losses[i];
  sum = over_block<Plus>(sum, C(0));
  if (threadIdx.x == 0) *out = cast<T>((C)((double)sum / (divisor ? *divisor : 1.0)));
}
template <class T>
__global__ void cross_entropy_backward(const Compute<T>* dloss, const T* x, const i64* target, const Compute<T>* weight,
                                       const double* lse, const double* divisor, T* dx, const Lines l,
                                       const Classes c) {
  typedef Compute<T> C;
  const C smooth = (C)c.smoothing, share = smooth / (C)l.length;
  const C all = c.smoothing > 0 ? total_weight(weight, l.length) : C(0);
  for (i64 line = blockIdx.x; line < l.count; line += gridDim.x) {
    const i64 first = first_of(l, line), t = target[line];
    const bool counts = t != c.ignore_index;
    if (counts && (t < 0 || t >= l.length)) {
      if (threadIdx.x == 0) report(c.fault, (i32)c.row, line, t, l.length);
      continue;
    }
    const C g = (C)((double)dloss[c.each ? line : 0] / (divisor ? *divisor : 1.0));
    const C hit = counts ? g * (1 - smooth) * (weight ? weight[t] : C(1)) : C(0);
    const Shift<C> by(lse[line], hit + g * share * all);
    for (i64 j = threadIdx.x; j < l.length; j += blockDim.x) {
      const i64 at = first + j * l.inner;
      C d = 0;
      if (counts) {
        d = by.scale * ::exp(widen(x[at]) - by.shift);
        if (c.smoothing > 0) d -= g * share * (weight ? weight[j] : C(1));
        if (j == t) d -= hit;
      }
      dx[at] = cast<T>(d);
    }
  }
}
template <class T>
__global__ void picked_losses(const T* x, const i64* target, const Compute<T>* weight, Compute<T>* losses,
                              const Lines l, const Classes c) {
  FOR_EACH_ELEMENT(i, l.count) {
    const i64 t = target[i];
    losses[i] = 0;
    if (t == c.ignore_index) continue;
    if (t < 0 || t >= l.length) {
      report(c.fault, (i32)c.row, i, t, l.length);
      continue;
    }
    losses[i] = -(weight ? weight[t] : Compute<T>(1)) * widen(x[first_of(l, i) + t * l.inner]);
  }
}
template <class T>
__global__ void picked_losses_backward(const Compute<T>* dloss, const i64* target, const Compute<T>* weight,
                                       const double* divisor, T* dx, const Lines l, const Classes c) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, l.count) {
    const i64 t = target[i];
    if (t == c.ignore_index) continue;
    if (t < 0 || t >= l.length) {
      report(c.fault, (i32)c.row, i, t, l.length);
      continue;
    }
    const C g = (C)((double)dloss[c.each ? i : 0] / (divisor ? *divisor : 1.0));
    dx[first_of(l, i) + t * l.inner] = cast<T>(-g * (weight ? weight[t] : C(1)));
  }
}
