// Batch normalisation and pooling of [N, C, area] and [N, C, H, W], contiguous.
template <class T>
__global__ void channel_moments(const T* x, Compute<T>* means, Compute<T>* variances, i64 N, i64 channels, i64 area) {
  typedef Compute<T> C;
  const i64 count = N * area;
  for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
    C sum = 0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += widen(x[(i / area * channels + c) * area + i % area]);
    const C mean = over_block<Plus>(sum, C(0)) / (C)count;
    C squares = 0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
      const C d = widen(x[(i / area * channels + c) * area + i % area]) - mean;
      squares += d * d;
    }
    squares = over_block<Plus>(squares, C(0));
    if (threadIdx.x == 0) {
      means[c] = mean;
      variances[c] = squares / (C)count;
    }
  }
}
template <class T>
__global__ void channel_normalize(const T* x, const Compute<T>* means, const Compute<T>* variances,
                                  const Compute<T>* weight, const Compute<T>* bias, T* y, i64 elems, i64 channels,
                                  i64 area, double eps) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, elems) {
    const i64 c = i / area % channels;
    const C scale = C(1) / ::sqrt(variances[c] + (C)eps) * (weight ? weight[c] : C(1));
    y[i] = cast<T>((widen(x[i]) - means[c]) * scale + (bias ? bias[c] : C(0)));
  }
}
// Sums of dy z and of dy over each channel, with z = (x - mean) * rstd.
template <class T>
__global__ void channel_sums(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* variances,
                             Compute<T>* dweight, Compute<T>* dbias, i64 N, i64 channels, i64 area, double eps) {
  typedef Compute<T> C;
  const i64 count = N * area;
  for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
    const C mean = means[c], rstd = C(1) / ::sqrt(variances[c] + (C)eps);
    C g = 0, gz = 0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
      const i64 at = (i / area * channels + c) * area + i % area;
      g += widen(dy[at]);
      gz += widen(dy[at]) * (widen(x[at]) - mean) * rstd;
    }
    g = over_block<Plus>(g, C(0));
    gz = over_block<Plus>(gz, C(0));
    if (threadIdx.x == 0) {
      dweight[c] = gz;
      dbias[c] = g;
    }
  }
}
template <class T>
__global__ void channel_backward(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* variances,
                                 const Compute<T>* weight, const Compute<T>* gz, const Compute<T>* g, T* dx, i64 elems,
                                 i64 count, i64 channels, i64 area, double eps) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, elems) {
    const i64 c = i / area % channels;
    const C rstd = C(1) / ::sqrt(variances[c] + (C)eps), z = (widen(x[i]) - means[c]) * rstd;
    dx[i] = cast<T>((widen(dy[i]) - g[c] / (C)count - z * gz[c] / (C)count) * rstd * (weight ? weight[c] : C(1)));
  }
}
template <class T>
__global__ void move_average(const T* running, const double* now, T* out, i64 n, double momentum, double scale) {
  FOR_EACH_ELEMENT(i, n) out[i] = cast<T>((1 - momentum) * (double)widen(running[i]) + momentum * scale * now[i]);
}

// ---- pooling: windows as in kernel/pool_window.h

struct Side {
  i64 kernel, stride, padding, dilation;  // kernel 0: adaptive
  i64 size, outputs;
};
struct Pool {
  i64 planes;
  Side h, w;
  i64 include_padding, fixed;
};
struct Span {
  i64 begin, end, step, padded;
};
__device__ __forceinline__ Span span_of(const Side& s, i64 i) {
  if (s.kernel == 0) {
    const i64 begin = i * s.size / s.outputs, end = ((i + 1) * s.size + s.outputs - 1) / s.outputs;
    return {begin, end, 1, end - begin};
  }
  const i64 reach = (s.kernel - 1) * s.dilation + 1, first = i * s.stride - s.padding;
  const i64 bound = s.size + s.padding, last = first + reach < bound ? first + reach : bound;
  const i64 skipped = first < 0 ? (-first + s.dilation - 1) / s.dilation : 0;
  return {first + skipped * s.dilation, last < s.size ? last : s.size, s.dilation,
          (last - first + s.dilation - 1) / s.dilation};
}
__device__ __forceinline__ i64 count_of(const Span& s) {
  return s.begin < s.end ? (s.end - s.begin + s.step - 1) / s.step : 0;
}
__device__ __forceinline__ double divisor_of(const Pool& p, const Span& rows, const Span& columns) {
  if (p.fixed != 0) return (double)p.fixed;
  return (double)(p.include_padding ? rows.padded * columns.padded : count_of(rows) * count_of(columns));
}
template <class T>
__global__ void pool_largest(const T* x, T* y, i64* indices, const Pool p) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, p.planes * p.h.outputs * p.w.outputs) {
    const Span rows = span_of(p.h, i / p.w.outputs % p.h.outputs), columns = span_of(p.w, i % p.w.outputs);
    const T* const plane = x + i / p.w.outputs / p.h.outputs * p.h.size * p.w.size;
    C best = -C(1) / C(0);
    i64 index = rows.begin * p.w.size + columns.begin;
    for (i64 h = rows.begin; h < rows.end; h += rows.step) {
      for (i64 w = columns.begin; w < columns.end; w += columns.step) {
        const C value = widen(plane[h * p.w.size + w]);
        if (value > best || value != value) {
          best = value;
          index = h * p.w.size + w;
        }
      }
    }
    y[i] = cast<T>(best);
    indices[i] = index;
  }
}
// A plane's gradients are one thread's, in order.
template <class T>
__global__ void pool_largest_backward(const T* dy, const i64* indices, Compute<T>* dx, const Pool p, Fault* fault,
                                      i64 row) {
  const i64 outputs = p.h.outputs * p.w.outputs, area = p.h.size * p.w.size;
  FOR_EACH_ELEMENT(plane, p.planes) {
    for (i64 i = 0; i < outputs; ++i) {
      const i64 index = indices[plane * outputs + i];
      if (index < 0 || index >= area) {
        report(fault, (i32)row, plane * outputs + i, index, area);
        continue;
      }
      dx[plane * area + index] += widen(dy[plane * outputs + i]);
    }
  }
}
template <class T>
__global__ void pool_mean(const T* x, T* y, const Pool p) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, p.planes * p.h.outputs * p.w.outputs) {
    const Span rows = span_of(p.h, i / p.w.outputs % p.h.outputs), columns = span_of(p.w, i % p.w.outputs);
    const T* const plane = x + i / p.w.outputs / p.h.outputs * p.h.size * p.w.size;
    C sum = 0;
    for (i64 h = rows.begin; h < rows.end; h += rows.step) {
      for (i64 w = columns.begin; w < columns.end; w += columns.step) sum += widen(plane[h * p.w.size + w]);
    }
    y[i] = cast<T>(sum * (C)(1 / divisor_of(p, rows, columns)));
  }
}
// The windows that may hold place `at`.
__device__ __forceinline__ void windows_around(const Side& s, i64 at, i64& first, i64& last) {
  if (s.kernel == 0) {
    first = at * s.outputs / s.size;
    last = ((at + 1) * s.outputs + s.size - 1) / s.size;
    first = first > 0 ? first - 1 : 0;
  } else {
    const i64 reach = (s.kernel - 1) * s.dilation + 1;
    first = at + s.padding - reach + 1;
    first = first > 0 ? (first + s.stride - 1) / s.stride : 0;
    last = (at + s.padding) / s.stride;
  }
  if (last > s.outputs - 1) last = s.outputs - 1;
}
template <class T>
__global__ void pool_mean_backward(const T* dy, T* dx, const Pool p) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, p.planes * p.h.size * p.w.size) {
    const i64 h = i / p.w.size % p.h.size, w = i % p.w.size;
    const T* const plane = dy + i / p.w.size / p.h.size * p.h.outputs * p.w.outputs;
    i64 top, bottom, left, right;
    windows_around(p.h, h, top, bottom);
    windows_around(p.w, w, left, right);
    C sum = 0;
    for (i64 a = top; a <= bottom; ++a) {
      const Span rows = span_of(p.h, a);
      if (h < rows.begin || h >= rows.end || (h - rows.begin) % rows.step != 0) continue;
      for (i64 b = left; b <= right; ++b) {
        const Span columns = span_of(p.w, b);
        if (w < columns.begin || w >= columns.end || (w - columns.begin) % columns.step != 0) continue;
        sum += widen(plane[a * p.w.outputs + b]) * (C)(1 / divisor_of(p, rows, columns));
      }
    }
    dx[i] = cast<T>(sum);
  }
}
