// Rows that lie one behind the other, read 16 bytes at a time. Sums have a fixed order.
// The elements of another type that belong to a Pack16<T>: equally many.
template <class T, class L>
struct alignas(sizeof(L) * Pack16<T>::kCount) PackLike {
  L at[Pack16<T>::kCount];
};
template <class T>
__device__ __forceinline__ T over_warp(T x) {
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}

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
// out[which] = the sum over chunks of partial[chunk][which], with `which` the block's y.
template <class C, class O>
__global__ void __launch_bounds__(256)
    join_columns(const C* partial, O* out0, O* out1, i64 chunks, i64 stride, i64 columns, double divisor) {
  __shared__ C parts[8][33];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  const i64 column = blockIdx.x * 32ll + lane;
  C sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (i64 k = strip; k < chunks; k += 8) sum += partial[k * stride + blockIdx.y * columns + column];
  }
  parts[strip][lane] = sum;
  __syncthreads();
  if (strip == 0 && column < columns) {
    sum = 0;
    for (int k = 0; k < 8; ++k) sum += parts[k][lane];
    (blockIdx.y == 0 ? out0 : out1)[column] = cast<O>(sum / (C)divisor);
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
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        C z = (v[k][j] - mean) * rstd;
        if (weight) z *= weight[column + j];
        if (bias) z += bias[column + j];
        pack.at[j] = cast<L>(cast<T>(z));
      }
      *(Narrow*)(y + row * n + column) = pack;
    }
  }
}
// Each block leaves its sums for the gradients of weight and bias in partial[block][2][n], where that is given. With
// kAdds dx is added to `more`, and goes to `lower`, too, whose columns are summed with kSums, as sum_columns does it;
// those sums are kept in shared memory, since the registers are full: of rows of up to 768 f32 two blocks shall fit on
// a multiprocessor, so `more` is read late. dy is of type L.
template <class T, class L, bool kCentered, int kPacks, bool kAdds, bool kSums>
__global__ void __launch_bounds__(256, sizeof(T) <= 4 && kPacks * Pack16<T>::kCount <= 24 ? 2 : 1)
    normalize_backward_in_warps(const T* __restrict__ more, const L* dy, const T* x, const Compute<T>* means,
                                const Compute<T>* rstds, const Compute<T>* weight, T* dx, L* lower, Compute<T>* partial,
                                Compute<L>* lower_partial, i64 rows, i64 n) {
  typedef Compute<T> C;
  typedef PackLike<T, L> Narrow;
  typedef PackLike<T, Compute<L> > Sums;
  constexpr int kCount = Pack16<T>::kCount, kColumns = kPacks * 32 * kCount;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ C parts[2][kColumns];
  __shared__ Sums lower_sums[kSums ? 8 : 1][kSums ? kPacks * 32 : 1];
  C dweight[kPacks][kCount] = {}, dbias[kPacks][kCount] = {};
  if constexpr (kSums) {
    for (int k = 0; k < kPacks; ++k) lower_sums[warp][k * 32 + lane] = Sums{};
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
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const C g = widen(from_dy[k].at[j]), z = (widen(from_x[k].at[j]) - mean) * rstd;
        const C scaled = weight ? g * weight[column + j] : g;
        sum += scaled;
        dot += scaled * z;
        dweight[k][j] += g * z;
        dbias[k][j] += g;
      }
    }
    sum = kCentered ? over_warp(sum) / (C)n : C(0);
    dot = over_warp(dot) / (C)n;
    constexpr int kAtOnce = 3;  // so many packs of `more` are on their way together
#pragma unroll
    for (int first = 0; first < kPacks; first += kAtOnce) {
      Pack16<T> from_more[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i64 column = ((first + i) * 32 + lane) * kCount;
        if (kAdds && first + i < kPacks && column < n) from_more[i] = *(const Pack16<T>*)(more + row * n + column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int k = first + i;
        const i64 column = (k * 32 + lane) * kCount;
        if (k >= kPacks || column >= n) continue;
        Pack16<T> pack;
        Narrow narrow;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const C g = widen(from_dy[k].at[j]), z = (widen(from_x[k].at[j]) - mean) * rstd;
          pack.at[j] = cast<T>(((weight ? g * weight[column + j] : g) - sum - z * dot) * rstd);
          if constexpr (kAdds) {
            pack.at[j] = cast<T>(plain_sum(widen(from_more[i].at[j]), widen(pack.at[j])));
            narrow.at[j] = cast<L>(pack.at[j]);
          }
        }
        *(Pack16<T>*)(dx + row * n + column) = pack;
        if constexpr (kAdds) *(Narrow*)(lower + row * n + column) = narrow;
        if constexpr (kSums) {
          Sums& sums = lower_sums[warp][k * 32 + lane];
#pragma unroll
          for (int j = 0; j < kCount; ++j) sums.at[j] += widen(narrow.at[j]);
        }
      }
    }
  }
  if constexpr (kSums) {
    __syncthreads();
    for (i64 i = threadIdx.x; i < n; i += 256) {
      Compute<L> sum = 0;
      for (int k = 0; k < 8; ++k) sum += lower_sums[k][i / kCount].at[i % kCount];
      lower_partial[blockIdx.x * n + i] = sum;
    }
  }
  if (!partial) return;
  for (int turn = 0; turn < 8; ++turn) {  // warps add their sums one after the other
    if (warp == turn) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const int at = (k * 32 + lane) * kCount + j;
          parts[0][at] = turn == 0 ? dweight[k][j] : parts[0][at] + dweight[k][j];
          parts[1][at] = turn == 0 ? dbias[k][j] : parts[1][at] + dbias[k][j];
        }
    }
    __syncthreads();
  }
  for (i64 i = threadIdx.x; i < n; i += 256) {
    partial[blockIdx.x * 2ll * n + i] = parts[0][i];
    partial[(blockIdx.x * 2ll + 1) * n + i] = parts[1][i];
  }
}

// sum = x + more, where the norm is left to other kernels.
template <class T, class L>
__global__ void add_narrow(const T* x, const L* more, T* sum, i64 elems) {
  FOR_EACH_ELEMENT(i, elems) sum[i] = cast<T>(widen(x[i]) + (Compute<T>)widen(more[i]));
}

// ---- cross entropy without class weights and smoothing, a block per row

// exp(x - base). A 16-bit result needs no more than the fast exponential, which errs by 2 in the last place of f32.
template <class T>
__device__ __forceinline__ Compute<T> exponential(Compute<T> x, Compute<T> base) {
  if constexpr (sizeof(T) == 2) {
    constexpr float kLog2E = 1.4426950408889634f;
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(::fmaf(x, kLog2E, base * -kLog2E)));
    return y;
  } else {
    return ::exp(x - base);
  }
}
template <class T>
struct MostAndSum {  // of exp(x - most)
  typedef Compute<T> C;
  C most, sum;
  template <int kCount>
  __device__ __forceinline__ void add(const T* values) {
    C v[kCount], top = most;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      v[j] = widen(values[j]);
      top = v[j] > top ? v[j] : top;
    }
    const C base = top == -C(1) / C(0) ? C(0) : top;
    C more = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) more += exponential<T>(v[j], base);
    sum = (top > most ? sum * exponential<T>(most, base) : sum) + more;
    most = top;
  }
};
// A row need not begin at a multiple of 16 bytes: the elements before the first such address are read one by one.
template <class T>
__device__ __forceinline__ i64 elements_before_packs(const T* row, i64 length) {
  const i64 before = (i64)((16 - (u64)row % 16) % 16 / sizeof(T));
  return before < length ? before : length;
}
// log(sum(exp)) of what was added.
template <class T>
__device__ __forceinline__ double logsumexp(const MostAndSum<T>& of) {
  const Compute<T> infinite = Compute<T>(1) / Compute<T>(0);
  return (double)of.most + (of.most == infinite ? 0.0 : ::log((double)of.sum));
}
// The whole block's.
template <class T>
__device__ __forceinline__ MostAndSum<T> sums_of_row(const T* row, i64 length) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const C infinite = C(1) / C(0);
  const i64 before = elements_before_packs(row, length), packs = (length - before) / kCount;
  MostAndSum<T> all = {-infinite, 0};
  for (i64 j = threadIdx.x; j < before; j += blockDim.x) all.template add<1>(row + j);
  const Pack16<T>* const body = (const Pack16<T>*)(row + before);
#pragma unroll 4
  for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack16<T> pack = body[i];
    all.template add<kCount>(pack.at);
  }
  for (i64 j = before + packs * kCount + threadIdx.x; j < length; j += blockDim.x) all.template add<1>(row + j);
  const C top = over_block<Larger>(all.most, -infinite);
  const C sum = over_block<Plus>(all.most == -infinite ? all.sum : all.sum * exponential<T>(all.most, top), C(0));
  return {top, sum};
}
// The loss of a row with that logsumexp, which is 0 where its target does not count.
template <class T>
__device__ __forceinline__ Compute<T> loss_of_row(const T* row, i64 length, i64 t, double lse, i64 ignore_index,
                                                  i64 line, Fault* fault, i64 op) {
  if (t == ignore_index) return 0;
  if (t >= 0 && t < length) return (Compute<T>)(lse - (double)widen(row[t]));
  report(fault, (i32)op, line, t, length);
  return 0;
}
// The gradient of a row goes to `to`, which may be the row. g: that of its loss, or 0 where its target does not count.
template <class T>
__device__ __forceinline__ void write_slopes(const T* row, T* to, i64 length, i64 t, bool counts, Compute<T> g,
                                             double lse) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const bool alike = (u64)row % 16 == (u64)to % 16;
  const i64 before = alike ? elements_before_packs(row, length) : length, packs = (length - before) / kCount;
  const i64 behind = before + packs * kCount;
  const Shift<C> soft(lse, g);
  const auto slope = [&](T value) { return soft.scale * exponential<T>(widen(value), soft.shift); };
  const auto narrow = [&](C p) { return cast<T>(counts ? p : C(0)); };
  // The thread that writes the target's element writes it once more: the others need not look for it.
  const i64 writer = t < before ? t : t < behind ? (t - before) / kCount : t - behind;
  const bool writes_target = counts && writer % blockDim.x == threadIdx.x;
  const T own = writes_target ? row[t] : T{};
  for (i64 j = threadIdx.x; j < before; j += blockDim.x) to[j] = narrow(slope(row[j]));
#pragma unroll 4
  for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack16<T> pack = ((const Pack16<T>*)(row + before))[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) pack.at[j] = narrow(slope(pack.at[j]));
    ((Pack16<T>*)(to + before))[i] = pack;
  }
  for (i64 j = behind + threadIdx.x; j < length; j += blockDim.x) to[j] = narrow(slope(row[j]));
  if (writes_target) to[t] = cast<T>(slope(own) - g);
}

template <class T>
__global__ void __launch_bounds__(512)
    cross_entropy_of_rows(const T* x, const i64* target, double* lse, Compute<T>* losses, i64 rows, i64 length,
                          i64 x_row, i64 ignore_index, Fault* fault, i64 op) {
  for (i64 line = blockIdx.x; line < rows; line += gridDim.x) {
    const T* const row = x + line * x_row;
    const MostAndSum<T> all = sums_of_row(row, length);
    if (threadIdx.x != 0) continue;
    const double found = logsumexp(all);
    lse[line] = found;
    losses[line] = loss_of_row(row, length, target[line], found, ignore_index, line, fault, op);
  }
}
// Both ways: a row is read again while it is in the cache. dx may be x; without dloss, that is 1.
template <class T>
__global__ void __launch_bounds__(512, 3)
    cross_entropy_and_slopes(const Compute<T>* dloss, const T* x, const i64* target, const double* divisor, double* lse,
                             Compute<T>* losses, T* dx, i64 rows, i64 length, i64 x_row, i64 dx_row, i64 ignore_index,
                             i64 each, Fault* fault, i64 op) {
  typedef Compute<T> C;
  __shared__ double found;
  for (i64 line = blockIdx.x; line < rows; line += gridDim.x) {
    const T* const row = x + line * x_row;
    const MostAndSum<T> all = sums_of_row(row, length);
    const i64 t = target[line];
    if (threadIdx.x == 0) {
      found = logsumexp(all);
      lse[line] = found;
      losses[line] = loss_of_row(row, length, t, found, ignore_index, line, fault, op);
    }
    __syncthreads();  // and the loss was read, where the gradient now goes
    const bool counts = t != ignore_index;
    if (counts && (t < 0 || t >= length)) continue;
    const double whole = dloss ? (double)dloss[each ? line : 0] : 1.0, by = divisor ? *divisor : 1.0;
    write_slopes(row, dx + line * dx_row, length, t, counts, counts ? (C)(whole / by) : C(0), found);
  }
}
// A small problem whole, in one block: a warp per row, sums over warps in their order. `mean`: divided by the targets
// that count; out has one element, or one per row where `each` says so. dx: null, or where the gradient goes.
template <class T>
__global__ void __launch_bounds__(1024)
    cross_entropy_in_one_block(const Compute<T>* dloss, const T* x, const i64* target, double* lse, Compute<T>* out,
                               T* dx, i64 rows, i64 length, i64 ignore_index, i64 mean, i64 each, Fault* fault,
                               i64 op) {
  typedef Compute<T> C;
  const C infinite = C(1) / C(0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  __shared__ C sums[32];
  __shared__ i64 counts[32];
  C total = 0;
  i64 count = 0;
  for (i64 line = warp; line < rows; line += warps) {
    const T* const row = x + line * length;
    MostAndSum<T> all = {-infinite, 0};
    for (i64 j = lane; j < length; j += 32) all.template add<1>(row + j);
    C top = all.most;
    for (int by = 16; by > 0; by /= 2) top = Larger::of(top, __shfl_xor_sync(0xffffffffu, top, by));
    const C sum = over_warp(all.most == -infinite ? all.sum : all.sum * exponential<T>(all.most, top));
    if (lane != 0) continue;
    const double found = logsumexp(MostAndSum<T>{top, sum});
    lse[line] = found;
    const i64 t = target[line];
    C loss = 0;
    if (t != ignore_index) {
      if (t < 0 || t >= length) {
        report(fault, (i32)op, line, t, length);
      } else {
        loss = (C)(found - (double)widen(row[t]));
        ++count;
      }
    }
    if (each) out[line] = loss;
    total += loss;
  }
  if (lane == 0) {
    sums[warp] = total;
    counts[warp] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0 && !each) {
    for (int k = 1; k < warps; ++k) {
      total += sums[k];
      count += counts[k];
    }
    *out = mean ? (C)((double)total / (double)count) : total;
  }
  if (!dx) return;
  i64 all = 0;
  for (int k = 0; k < warps; ++k) all += counts[k];
  for (i64 line = warp; line < rows; line += warps) {
    const i64 t = target[line];
    const bool is_counted = t != ignore_index;
    if (is_counted && (t < 0 || t >= length)) continue;
    const double whole = dloss ? (double)dloss[each ? line : 0] : 1.0;
    const C g = is_counted ? (C)(whole / (mean ? (double)all : 1.0)) : C(0);
    const Shift<C> soft(lse[line], g);
    for (i64 j = lane; j < length; j += 32) {
      const C p = is_counted ? soft.scale * exponential<T>(widen(x[line * length + j]), soft.shift) : C(0);
      dx[line * length + j] = cast<T>(is_counted && j == t ? p - g : p);
    }
  }
}
// dx may be x. Without a divisor and with `mean`, each block counts the targets itself.
template <class T>
__global__ void __launch_bounds__(512)
    cross_entropy_backward_of_rows(const Compute<T>* dloss, const T* x, const i64* target, const double* lse,
                                   const double* divisor, T* dx, i64 rows, i64 length, i64 x_row, i64 dx_row,
                                   i64 ignore_index, i64 each, i64 mean, Fault* fault, i64 op) {
  typedef Compute<T> C;
  double by = divisor ? *divisor : 1.0;
  if (mean && !divisor) {
    i64 count = 0;
    for (i64 i = threadIdx.x; i < rows; i += blockDim.x)
      count += target[i] != ignore_index && target[i] >= 0 && target[i] < length ? 1 : 0;
    by = (double)over_block<Plus>(count, (i64)0);
  }
  for (i64 line = blockIdx.x; line < rows; line += gridDim.x) {
    const i64 t = target[line];
    const bool counts = t != ignore_index;
    if (counts && (t < 0 || t >= length)) {
      if (threadIdx.x == 0) report(fault, (i32)op, line, t, length);
      continue;
    }
    const C g = counts ? (C)((double)dloss[each ? line : 0] / by) : C(0);
    write_slopes(x + line * x_row, dx + line * dx_row, length, t, counts, g, lse[line]);
  }
}
