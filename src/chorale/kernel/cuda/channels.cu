// Batch normalisation of a matrix [rows, channels] in row-major order, as images with their channels last are, read 16
// bytes at a time, with the sum and the ReLU that may follow it. A block has 256 threads: `across` of them side by side
// on packs of a row, the others on further rows. blockIdx.x chooses the packs; the blocks of one blockIdx.x go through
// the rows together: upwards where sums are made, downwards afterwards, so that what was read last, or was written last
// by the kernel before, is still in the cache. Sums have a fixed order.
struct Columns {
  i64 rows, channels;
  i64 shift;  // `across` is 1 << shift
  __device__ __forceinline__ u32 across() const { return 1u << (int)shift; }
  __device__ __forceinline__ u32 high() const { return 256u >> (int)shift; }
  __device__ __forceinline__ i64 column(int count) const {
    return ((blockIdx.x << (int)shift) + (threadIdx.x & (across() - 1))) * (i64)count;
  }
  __device__ __forceinline__ i64 first() const { return blockIdx.y * high() + (threadIdx.x >> (int)shift); }
  __device__ __forceinline__ i64 step() const { return gridDim.y * high(); }
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
  const int wide = (int)m.across() * kCount, high = (int)m.high();
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
__global__ void __launch_bounds__(256, 4) moments_of_columns(const T* x, Compute<T>* partial, const Columns m) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  C sum[kCount] = {}, squares[kCount] = {}, near[kCount] = {};
  if (column < m.channels) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) near[j] = widen(x[column + j]);
#pragma unroll 4
    for (i64 row = m.rows - 1 - m.first(); row >= 0; row -= m.step()) {
      const Pack16<T> pack = pack_at(x, row * m.channels + column);
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

// The totals of one column over chunks, in double: of a block of 1,024 each of 32 threads takes some chunks.
template <class C>
__device__ __forceinline__ bool total_of_column(const C* partial, i64 chunks, i64 channels, i64& column, double& a,
                                                double& b) {
  __shared__ double parts[2][32][33];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  column = blockIdx.x * 32ll + lane;
  a = b = 0;
  if (column < channels) {
#pragma unroll 4
    for (i64 k = strip; k < chunks; k += 32) {
      a += (double)partial[2 * k * channels + column];
      b += (double)partial[(2 * k + 1) * channels + column];
    }
  }
  parts[0][strip][lane] = a;
  parts[1][strip][lane] = b;
  __syncthreads();
  if (strip != 0 || column >= channels) return false;
  a = b = 0;
  for (int k = 0; k < 32; ++k) {
    a += parts[0][k][lane];
    b += parts[1][k][lane];
  }
  return true;
}
template <class T>
__global__ void __launch_bounds__(1024) join_moments(const T* x, const Compute<T>* partial, Compute<T>* means,
                                                     Compute<T>* variances, i64 chunks, i64 rows, i64 channels) {
  i64 column;
  double sum, squares;
  if (!total_of_column(partial, chunks, channels, column, sum, squares)) return;
  const double offset = sum / (double)rows, variance = squares / (double)rows - offset * offset;
  means[column] = (Compute<T>)((double)widen(x[column]) + offset);
  variances[column] = (Compute<T>)(variance > 0 ? variance : variance < 0 ? 0 : variance);
}
template <class C>
__global__ void __launch_bounds__(1024)
    join_slopes(const C* partial, const C* variances, C* dweight, C* dbias, i64 chunks, i64 channels, double eps) {
  i64 column;
  double sum, dot;
  if (!total_of_column(partial, chunks, channels, column, sum, dot)) return;
  dbias[column] = (C)sum;
  dweight[column] = (C)(dot / ::sqrt((double)variances[column] + eps));
}

// What a thread knows of its channels.
template <class C, int kCount>
struct ChannelScale {
  C mean[kCount], scale[kCount], shift[kCount];
  __device__ __forceinline__ void read(i64 column, const C* means, const C* variances, const C* weight, const C* bias,
                                       double eps) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      mean[j] = means[column + j];
      scale[j] = C(1) / ::sqrt(variances[column + j] + (C)eps) * (weight ? weight[column + j] : C(1));
      shift[j] = bias ? bias[column + j] : C(0);
    }
  }
  // Rounded once on the way, wherever it is written: the ReLU's gradient computes it again.
  __device__ __forceinline__ C of(C x, int j) const { return ::fma(x - mean[j], scale[j], shift[j]); }
};

// kSum: `other` is added to it. kRelu: what is below zero becomes zero. Each step rounds, as the rows one by one do.
template <class T, bool kSum, bool kRelu>
__global__ void __launch_bounds__(256, 4)
    normalize_columns(const T* __restrict__ x, const T* __restrict__ other, const Compute<T>* means,
                      const Compute<T>* variances, const Compute<T>* weight, const Compute<T>* bias, T* __restrict__ y,
                      const Columns m, double eps) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  if (column >= m.channels) return;
  ChannelScale<C, kCount> norm;
  norm.read(column, means, variances, weight, bias, eps);
#pragma unroll 4
  for (i64 row = m.first(); row < m.rows; row += m.step()) {
    const i64 at = row * m.channels + column;
    Pack16<T> pack = pack_at(x, at), more;
    if constexpr (kSum) more = pack_at(other, at);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      pack.at[j] = cast<T>(norm.of(widen(pack.at[j]), j));
      if constexpr (kSum) pack.at[j] = cast<T>(widen(pack.at[j]) + widen(more.at[j]));
      if constexpr (kRelu) pack.at[j] = widen(pack.at[j]) < C(0) ? cast<T>(C(0)) : pack.at[j];
    }
    *(Pack16<T>*)(y + at) = pack;
  }
}

// Where the gradient behind the norm comes from: dy as it is; dy where the ReLU of the norm let something through,
// which is computed again; or dy, or dy + other, where `y`, the result of a ReLU of the norm and something else, is not
// zero. The last is written, since others want it too.
enum { kPlain, kReluAgain, kReluOf, kReluOfSum };

// Sums of the gradient and of it times (x - mean).
template <class T, int kFrom>
__global__ void __launch_bounds__(256, 4)
    slopes_of_columns(const T* __restrict__ dy, const T* __restrict__ other, const T* __restrict__ y,
                      const T* __restrict__ x, const Compute<T>* means, const Compute<T>* variances,
                      const Compute<T>* weight, const Compute<T>* bias, T* __restrict__ through, Compute<T>* partial,
                      const Columns m, double eps) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  C sum[kCount] = {}, dot[kCount] = {};
  if (column < m.channels) {
    ChannelScale<C, kCount> norm;
    norm.read(column, means, variances, weight, bias, eps);
#pragma unroll 4
    for (i64 row = m.rows - 1 - m.first(); row >= 0; row -= m.step()) {
      const i64 at = row * m.channels + column;
      Pack16<T> g = pack_at(dy, at), more, result;
      const Pack16<T> v = pack_at(x, at);
      if constexpr (kFrom == kReluOfSum) more = pack_at(other, at);
      if constexpr (kFrom >= kReluOf) result = pack_at(y, at);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if constexpr (kFrom == kReluOfSum) g.at[j] = cast<T>(widen(g.at[j]) + widen(more.at[j]));
        if constexpr (kFrom == kReluAgain) result.at[j] = cast<T>(norm.of(widen(v.at[j]), j));
        if constexpr (kFrom != kPlain) g.at[j] = widen(result.at[j]) <= C(0) ? cast<T>(C(0)) : g.at[j];
        sum[j] += widen(g.at[j]);
        dot[j] += widen(g.at[j]) * (widen(v.at[j]) - norm.mean[j]);
      }
      if constexpr (kFrom >= kReluOf) *(Pack16<T>*)(through + at) = g;
    }
  }
  store_sums<C, kCount>(m, sum, dot, partial);
}
template <class T, bool kRelu>
__global__ void __launch_bounds__(256, 4)
    normalize_columns_backward(const T* __restrict__ dy, const T* __restrict__ x, const Compute<T>* means,
                               const Compute<T>* variances, const Compute<T>* weight, const Compute<T>* bias,
                               const Compute<T>* dweight, const Compute<T>* dbias, T* __restrict__ dx, const Columns m,
                               double eps) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i64 column = m.column(kCount);
  if (column >= m.channels) return;
  ChannelScale<C, kCount> norm;
  norm.read(column, means, variances, weight, bias, eps);
  C slope[kCount], shift[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    slope[j] = C(1) / ::sqrt(variances[column + j] + (C)eps) * dweight[column + j] / (C)m.rows;
    shift[j] = dbias[column + j] / (C)m.rows;
  }
#pragma unroll 2
  for (i64 row = m.first(); row < m.rows; row += m.step()) {
    const i64 at = row * m.channels + column;
    const Pack16<T> g = pack_at(dy, at);
    Pack16<T> pack = pack_at(x, at);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const C v = widen(pack.at[j]);
      C slope_here = widen(g.at[j]);
      if constexpr (kRelu) slope_here = widen(cast<T>(norm.of(v, j))) <= C(0) ? C(0) : slope_here;
      pack.at[j] = cast<T>((slope_here - shift[j] - (v - norm.mean[j]) * slope[j]) * norm.scale[j]);
    }
    *(Pack16<T>*)(dx + at) = pack;
  }
}
