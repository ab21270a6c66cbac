// Rows that lie one behind the other, read 16 bytes at a time. Sums have a fixed order.
// The elements of another type that belong to a Pack16<T>: equally many.
template <class T, class L>
struct alignas(sizeof(L) * Pack16<T>::kCount) PackLike {
  L at[Pack16<T>::kCount];
};
// Computed in more bits.
template <class T>
struct alignas(16) WidePack {
  Compute<T> at[Pack16<T>::kCount];
};

// ---- sums of columns: of rows that blocks share out here, of those sums in join_columns

template <class T>
__global__ void __launch_bounds__(256) sum_columns(const T* x, Compute<T>* partial, i64 rows, i64 columns, i64 stride) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  __shared__ C parts[8][32 * kCount];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  const i64 column = (blockIdx.x * 32ll + lane) * kCount;
  const i64 first = blockIdx.y * 8ll + strip, step = gridDim.y * 8ll;
  C sums[kCount] = {};
  if (column + kCount <= columns) {
#pragma unroll 4
    for (i64 row = first; row < rows; row += step) {
      const Pack16<T> pack = *(const Pack16<T>*)(x + row * stride + column);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] += widen(pack.at[j]);
    }
  } else if (column < columns) {
    for (i64 row = first; row < rows; row += step) {
      for (int j = 0; j < kCount && column + j < columns; ++j) sums[j] += widen(x[row * stride + column + j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) parts[strip][lane * kCount + j] = sums[j];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * kCount; i += 256) {
    const i64 at = blockIdx.x * 32ll * kCount + i;
    C sum = 0;
    for (int k = 0; k < 8; ++k) sum += parts[k][i];
    if (at < columns) partial[blockIdx.y * columns + at] = sum;
  }
}
// The sum over chunks of partial[chunk * stride], one for each lane; in the threads of the first strip.
template <class C>
__device__ __forceinline__ C over_chunks(const C* partial, i64 chunks, i64 stride, bool is_there) {
  __shared__ C parts[32][33];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  C sum = 0;
  if (is_there) {
#pragma unroll 8
    for (i64 k = strip; k < chunks; k += 32) sum += partial[k * stride];
  }
  parts[strip][lane] = sum;
  __syncthreads();
  sum = 0;
  if (strip == 0) {
    for (int k = 0; k < 32; ++k) sum += parts[k][lane];
  }
  return sum;
}
template <class C, class O>
__global__ void __launch_bounds__(1024)
    join_columns(const C* partial, O* out, i64 chunks, i64 columns, double divisor) {
  const i64 column = blockIdx.x * 32ll + threadIdx.x % 32;
  const C sum = over_chunks(partial + column, chunks, columns, column < columns);
  if (threadIdx.x < 32 && column < columns) out[column] = cast<O>(sum / (C)divisor);
}
// What the gradient of a norm leaves: partial[chunk][2][n] for weight and bias, and lower[chunk][n].
template <class C, class L>
__global__ void __launch_bounds__(1024)
    join_norm_columns(const C* partial, C* dweight, C* dbias, const Compute<L>* lower, L* sums, i64 chunks, i64 n) {
  const i64 column = blockIdx.x * 32ll + threadIdx.x % 32;
  const bool is_there = column < n, writes = is_there && threadIdx.x < 32;
  if (blockIdx.y < 2) {
    const C sum = over_chunks(partial + blockIdx.y * n + column, chunks, 2 * n, is_there);
    C* const out = blockIdx.y == 0 ? dweight : dbias;
    if (writes && out) out[column] = sum;
  } else {
    const Compute<L> sum = over_chunks(lower + column, chunks, n, is_there);
    if (writes) sums[column] = cast<L>(sum);
  }
}

// ---- layer norm: a warp per row, which it holds in registers, kPacks packs in each thread

// A sum that the compiler may not join with a product before it: the bits are those of two kernels.
__device__ __forceinline__ float plain_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plain_sum(double a, double b) { return __dadd_rn(a, b); }

// With kAdds x + more is normalised, which goes to `sum`. The result is of type L.
template <class T, class L, bool kCentered, int kPacks, bool kAdds>
__global__ void __launch_bounds__(256)
    normalize_in_warps(const T* x, const L* more, T* sum, const Compute<T>* weight, const Compute<T>* bias, L* y,
                       Compute<T>* means, Compute<T>* rstds, i64 rows, i64 n, double eps) {
  typedef Compute<T> C;
  typedef PackLike<T, L> Narrow;
  const int kCount = Pack16<T>::kCount, lane = threadIdx.x % 32;
  for (i64 row = blockIdx.x * 8ll + threadIdx.x / 32; row < rows; row += gridDim.x * 8ll) {
    C v[kPacks][kCount];
    C mean = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const i64 column = (k * 32 + lane) * kCount;
      Pack16<T> pack = {};
      if (column < n) pack = *(const Pack16<T>*)(x + row * n + column);
      if constexpr (kAdds) {
        Narrow other = {};
        if (column < n) other = *(const Narrow*)(more + row * n + column);
#pragma unroll
        for (int j = 0; j < kCount; ++j) pack.at[j] = cast<T>(plain_sum(widen(pack.at[j]), (C)widen(other.at[j])));
        if (column < n) *(Pack16<T>*)(sum + row * n + column) = pack;
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[k][j] = widen(pack.at[j]);
    }
    if (kCentered) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
#pragma unroll
        for (int j = 0; j < kCount; ++j) mean += v[k][j];
      mean = over_warp(mean) / (C)n;
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if ((k * 32 + lane) * kCount >= n) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) squares += (v[k][j] - mean) * (v[k][j] - mean);
    }
    const C rstd = C(1) / ::sqrt(over_warp(squares) / (C)n + (C)eps);
    if (lane == 0) {
      if (kCentered) means[row] = mean;
      rstds[row] = rstd;
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const i64 column = (k * 32 + lane) * kCount;
      if (column >= n) continue;
      Narrow pack;
      WidePack<T> scale, shift;
      if (weight) scale = *(const WidePack<T>*)(weight + column);
      if (bias) shift = *(const WidePack<T>*)(bias + column);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        C z = (v[k][j] - mean) * rstd;
        if (weight) z *= scale.at[j];
        if (bias) z += shift.at[j];
        pack.at[j] = cast<L>(cast<T>(z));
      }
      *(Narrow*)(y + row * n + column) = pack;
    }
  }
}
// Each block leaves its sums for the gradients of weight and bias in partial[block][2][n], where that is given. With
// kAdds dx is added to `more`, where that is given, and goes to `lower`, too, whose columns are summed with kSums, as
// sum_columns does it. Warps keep their sums in shared memory (norm_room), since registers are for what is on its way:
// of rows of up to 768 f32 two blocks fit on a multiprocessor. dy is of type L.
template <class T, class L, bool kCentered, int kPacks, bool kAdds, bool kSums>
__global__ void __launch_bounds__(256, sizeof(T) <= 4 && kPacks * Pack16<T>::kCount <= 24 ? 2 : 1)
    normalize_backward_in_warps(const T* __restrict__ more, const L* dy, const T* x, const Compute<T>* means,
                                const Compute<T>* rstds, const Compute<T>* weight, T* dx, L* lower, Compute<T>* partial,
                                Compute<L>* lower_partial, i64 rows, i64 n) {
  typedef Compute<T> C;
  typedef PackLike<T, L> Narrow;
  typedef PackLike<T, Compute<L> > Sums;
  constexpr int kCount = Pack16<T>::kCount, kPlaces = kPacks * 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  extern __shared__ Unit16 room[];
  WidePack<T>* const all = (WidePack<T>*)room;  // by warp: for weights, then for biases
  Sums* const all_lower = (Sums*)(all + 16 * kPlaces);
  WidePack<T>*const dweight = all + warp * kPlaces, *const dbias = all + (8 + warp) * kPlaces;
  Sums* const lower_sums = all_lower + warp * kPlaces;
  for (int at = lane; at < kPlaces; at += 32) {
    dweight[at] = dbias[at] = WidePack<T>{};
    if constexpr (kSums) lower_sums[at] = Sums{};
  }
  for (i64 row = blockIdx.x * 8ll + warp; row < rows; row += gridDim.x * 8ll) {
    Narrow from_dy[kPacks];
    Pack16<T> from_x[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const i64 column = (k * 32 + lane) * kCount;
      from_dy[k] = Narrow{};
      from_x[k] = Pack16<T>{};
      if (column >= n) continue;
      from_dy[k] = *(const Narrow*)(dy + row * n + column);
      from_x[k] = *(const Pack16<T>*)(x + row * n + column);
    }
    const C mean = kCentered ? means[row] : C(0), rstd = rstds[row];
    C sum = 0, dot = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const i64 column = (k * 32 + lane) * kCount;
      if (column >= n) continue;
      WidePack<T> scale, for_weight = dweight[k * 32 + lane], for_bias = dbias[k * 32 + lane];
      if (weight) scale = *(const WidePack<T>*)(weight + column);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const C g = widen(from_dy[k].at[j]), z = (widen(from_x[k].at[j]) - mean) * rstd;
        const C scaled = weight ? g * scale.at[j] : g;
        sum += scaled;
        dot += scaled * z;
        for_weight.at[j] = ::fma(g, z, for_weight.at[j]);  // in every instance: their bits are the same
        for_bias.at[j] += g;
      }
      dweight[k * 32 + lane] = for_weight;
      dbias[k * 32 + lane] = for_bias;
    }
    sum = kCentered ? over_warp(sum) / (C)n : C(0);
    dot = over_warp(dot) / (C)n;
    constexpr int kAtOnce = 6;  // so many packs of `more` are on their way together
#pragma unroll
    for (int first = 0; first < kPacks; first += kAtOnce) {
      Pack16<T> from_more[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i64 column = ((first + i) * 32 + lane) * kCount;
        if (kAdds && more && first + i < kPacks && column < n)
          from_more[i] = *(const Pack16<T>*)(more + row * n + column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int k = first + i;
        const i64 column = (k * 32 + lane) * kCount;
        if (k >= kPacks || column >= n) continue;
        Pack16<T> pack;
        Narrow narrow;
        WidePack<T> scale;
        if (weight) scale = *(const WidePack<T>*)(weight + column);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const C g = widen(from_dy[k].at[j]), z = (widen(from_x[k].at[j]) - mean) * rstd;
          pack.at[j] = cast<T>(((weight ? g * scale.at[j] : g) - sum - z * dot) * rstd);
          if constexpr (kAdds) {
            if (more) pack.at[j] = cast<T>(plain_sum(widen(from_more[i].at[j]), widen(pack.at[j])));
            narrow.at[j] = cast<L>(pack.at[j]);
          }
        }
        *(Pack16<T>*)(dx + row * n + column) = pack;
        if constexpr (kAdds) *(Narrow*)(lower + row * n + column) = narrow;
        if constexpr (kSums) {
          Sums& sums = lower_sums[k * 32 + lane];
#pragma unroll
          for (int j = 0; j < kCount; ++j) sums.at[j] += widen(narrow.at[j]);
        }
      }
    }
  }
  __syncthreads();
  for (i64 i = threadIdx.x; i < n; i += 256) {  // sums of warps in their order
    C for_weight = 0, for_bias = 0;
    Compute<L> for_lower = 0;
    for (int k = 0; k < 8; ++k) {
      for_weight += all[k * kPlaces + i / kCount].at[i % kCount];
      for_bias += all[(8 + k) * kPlaces + i / kCount].at[i % kCount];
      if constexpr (kSums) for_lower += all_lower[k * kPlaces + i / kCount].at[i % kCount];
    }
    if (partial) {
      partial[blockIdx.x * 2ll * n + i] = for_weight;
      partial[(blockIdx.x * 2ll + 1) * n + i] = for_bias;
    }
    if constexpr (kSums) lower_partial[blockIdx.x * n + i] = for_lower;
  }
}

// sum = x + more, where the norm is left to other kernels.
template <class T, class L>
__global__ void add_narrow(const T* x, const L* more, T* sum, i64 elems) {
  FOR_EACH_ELEMENT(i, elems) sum[i] = cast<T>(widen(x[i]) + (Compute<T>)widen(more[i]));
}
