// Batch normalisation of [N, C, area], contiguous; channels.cu has that with the channels last.
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
template <class T, class Now>
__global__ void move_average(const T* running, const Now* now, T* out, i64 n, double momentum, double scale) {
  FOR_EACH_ELEMENT(i, n) {
    out[i] = cast<T>((1 - momentum) * (double)widen(running[i]) + momentum * scale * (double)widen(now[i]));
  }
}

// y = relu(y), or relu(y + other).
template <class T>
__global__ void relu_of_sum(T* y, const T* other, i64 elems) {
  FOR_EACH_ELEMENT(i, elems) {
    const T sum = other ? cast<T>(widen(y[i]) + widen(other[i])) : y[i];
    y[i] = widen(sum) < Compute<T>(0) ? cast<T>(Compute<T>(0)) : sum;
  }
}
// dy, or dy + other, where the ReLU's result is not zero.
template <class T>
__global__ void through_relu(const T* dy, const T* other, const T* result, T* through, i64 elems) {
  FOR_EACH_ELEMENT(i, elems) {
    const T sum = other ? cast<T>(widen(dy[i]) + widen(other[i])) : dy[i];
    through[i] = widen(result[i]) <= Compute<T>(0) ? cast<T>(Compute<T>(0)) : sum;
  }
}
