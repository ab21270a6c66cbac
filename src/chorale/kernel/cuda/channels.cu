// Batch normalisation of a matrix [rows, channels] in row-major order, as images with their channels last are, read 16
// bytes at a time. A block has 256 threads: `across` of them side by side on packs of a row, the others on further
// rows. blockIdx.x chooses the packs, blockIdx.y a chunk of rows. Sums have a fixed order.
template <class T>
struct alignas(16) Pack16 {
  static const int kCount = 16 / sizeof(T);
  T at[kCount];
};
struct Columns {
  i64 rows, channels;
  i64 across;  // a power of two
  __device__ __forceinline__ i64 column(int count) const {
    return (blockIdx.x * across + threadIdx.x % across) * count;
  }
  __device__ __forceinline__ i64 begin() const {
    return blockIdx.y * ((rows + gridDim.y - 1) / gridDim.y) + threadIdx.x / across;
  }
  __device__ __forceinline__ i64 end() const {
    const i64 last = (blockIdx.y + 1) * ((rows + gridDim.y - 1) / gridDim.y);
    return last < rows ? last : rows;
  }
  __device__ __forceinline__ i64 step() const { return 256 / across; }
};

// The threads of a block that share a column add up, in order; partial[chunk][2][channels].
template <class C, int kCount>
__device__ __forceinline__ void store_sums(const Columns& m, const C* a, const C* b, C* partial) {
  __shared__ C parts[2][256 * kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    parts[0][threadIdx.x * kCount + j] = a[j];
    parts[1][threadIdx.x * kCount + j] = b[j];
  }
  __syncthreads();
  const int wide = (int)m.across * kCount, high = (int)(256 / m.across);
  for (int i = threadIdx.x; i < 2 * wide; i += 256) {
    const int which = i / wide, at = i % wide;
    const i64 column = blockIdx.x * (i64)wide + at;
    C sum = 0;
    for (int k = 0; k < high; ++k) sum += parts[which][k * wide + at];
    if (column < m.channels) partial[(blockIdx.y * 2ll + which) * m.channels + column] = sum;
  }
}

// Sums of x - x[0] and of its square: near the values, so that nothing is lost where the mean is large.
template <class T>
__global__ void __launch_bounds__(256) moments_of_columns(const T* x, Compute<T>* partial, const Columns m) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  C sum[kCount] = {}, squares[kCount] = {}, near[kCount] = {};
  if (column < m.channels) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) near[j] = widen(x[column + j]);
#pragma unroll 4
    for (i64 row = m.begin(); row < m.end(); row += m.step()) {
      const Pack16<T> pack = *(const Pack16<T>*)(x + row * m.channels + column);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const C d = widen(pack.at[j]) - near[j];
        sum[j] += d;
        squares[j] += d * d;
      }
    }
  }
  store_sums<C, kCount>(m, sum, squares, partial);
}
// Sums of dy and of dy (x - mean).
template <class T>
__global__ void __launch_bounds__(256)
    slopes_of_columns(const T* dy, const T* x, const Compute<T>* means, Compute<T>* partial, const Columns m) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  C sum[kCount] = {}, dot[kCount] = {}, mean[kCount] = {};
  if (column < m.channels) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) mean[j] = means[column + j];
#pragma unroll 4
    for (i64 row = m.begin(); row < m.end(); row += m.step()) {
      const Pack16<T> g = *(const Pack16<T>*)(dy + row * m.channels + column);
      const Pack16<T> v = *(const Pack16<T>*)(x + row * m.channels + column);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sum[j] += widen(g.at[j]);
        dot[j] += widen(g.at[j]) * (widen(v.at[j]) - mean[j]);
      }
    }
  }
  store_sums<C, kCount>(m, sum, dot, partial);
}

// The totals of one column over chunks, in double: 8 threads of a block of 256 each take some chunks.
template <class C>
__device__ __forceinline__ bool total_of_column(const C* partial, i64 chunks, i64 channels, i64& column, double& a,
                                                double& b) {
  __shared__ double parts[2][8][33];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  column = blockIdx.x * 32ll + lane;
  a = b = 0;
  if (column < channels) {
#pragma unroll 4
    for (i64 k = strip; k < chunks; k += 8) {
      a += (double)partial[2 * k * channels + column];
      b += (double)partial[(2 * k + 1) * channels + column];
    }
  }
  parts[0][strip][lane] = a;
  parts[1][strip][lane] = b;
  __syncthreads();
  if (strip != 0 || column >= channels) return false;
  a = b = 0;
  for (int k = 0; k < 8; ++k) {
    a += parts[0][k][lane];
    b += parts[1][k][lane];
  }
  return true;
}
template <class T>
__global__ void __launch_bounds__(256) join_moments(const T* x, const Compute<T>* partial, Compute<T>* means,
                                                    Compute<T>* variances, i64 chunks, i64 rows, i64 channels) {
  i64 column;
  double sum, squares;
  if (!total_of_column(partial, chunks, channels, column, sum, squares)) return;
  const double offset = sum / (double)rows, variance = squares / (double)rows - offset * offset;
  means[column] = (Compute<T>)((double)widen(x[column]) + offset);
  variances[column] = (Compute<T>)(variance > 0 ? variance : variance < 0 ? 0 : variance);
}
template <class C>
__global__ void __launch_bounds__(256)
    join_slopes(const C* partial, const C* variances, C* dweight, C* dbias, i64 chunks, i64 channels, double eps) {
  i64 column;
  double sum, dot;
  if (!total_of_column(partial, chunks, channels, column, sum, dot)) return;
  dbias[column] = (C)sum;
  dweight[column] = (C)(dot / ::sqrt((double)variances[column] + eps));
}

// A thread keeps the numbers of its channels and goes down the rows.
template <class T>
__global__ void __launch_bounds__(256)
    normalize_columns(const T* x, const Compute<T>* means, const Compute<T>* variances, const Compute<T>* weight,
                      const Compute<T>* bias, T* y, const Columns m, double eps) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  if (column >= m.channels) return;
  C mean[kCount], scale[kCount], shift[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    mean[j] = means[column + j];
    scale[j] = C(1) / ::sqrt(variances[column + j] + (C)eps) * (weight ? weight[column + j] : C(1));
    shift[j] = bias ? bias[column + j] : C(0);
  }
#pragma unroll 4
  for (i64 row = m.begin(); row < m.end(); row += m.step()) {
    Pack16<T> pack = *(const Pack16<T>*)(x + row * m.channels + column);
#pragma unroll
    for (int j = 0; j < kCount; ++j) pack.at[j] = cast<T>((widen(pack.at[j]) - mean[j]) * scale[j] + shift[j]);
    *(Pack16<T>*)(y + row * m.channels + column) = pack;
  }
}
template <class T>
__global__ void __launch_bounds__(256)
    normalize_columns_backward(const T* dy, const T* x, const Compute<T>* means, const Compute<T>* variances,
                               const Compute<T>* weight, const Compute<T>* dweight, const Compute<T>* dbias, T* dx,
                               const Columns m, double eps) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  if (column >= m.channels) return;
  C mean[kCount], scale[kCount], slope[kCount], shift[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const C rstd = C(1) / ::sqrt(variances[column + j] + (C)eps);
    mean[j] = means[column + j];
    scale[j] = rstd * (weight ? weight[column + j] : C(1));
    slope[j] = rstd * dweight[column + j] / (C)m.rows;
    shift[j] = dbias[column + j] / (C)m.rows;
  }
#pragma unroll 2
  for (i64 row = m.begin(); row < m.end(); row += m.step()) {
    const Pack16<T> g = *(const Pack16<T>*)(dy + row * m.channels + column);
    Pack16<T> pack = *(const Pack16<T>*)(x + row * m.channels + column);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      pack.at[j] = cast<T>((widen(g.at[j]) - shift[j] - (widen(pack.at[j]) - mean[j]) * slope[j]) * scale[j]);
    }
    *(Pack16<T>*)(dx + row * m.channels + column) = pack;
  }
}
