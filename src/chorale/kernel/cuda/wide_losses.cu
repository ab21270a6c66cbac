// Cross entropy of rows of classes that lie one behind the other, without class weights and smoothing: a block per row,
// read 16 bytes at a time. Sums have a fixed order.

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
      top = ::fmax(v[j], top);  // NaN is not the most, but a part of the sum
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
// The whole block's. Where `kept` is given the packs stay there, each for the thread that has read it.
template <class T, bool kKeeps>
__device__ __forceinline__ MostAndSum<T> sums_of_row(const T* row, i64 length, Pack16<T>* kept) {
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
    if (kKeeps) kept[i] = pack;
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
// `kept`: where its packs are read from, if it and `to` begin alike.
template <class T, bool kKeeps>
__device__ __forceinline__ void write_slopes(const T* row, T* to, i64 length, i64 t, bool counts, Compute<T> g,
                                             double lse, const Pack16<T>* kept) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const bool alike = (u64)row % 16 == (u64)to % 16;
  const i64 before = alike ? elements_before_packs(row, length) : length, packs = (length - before) / kCount;
  const i64 behind = before + packs * kCount;
  const Shift<C> soft(lse, g);
  const auto slope = [&](T value) { return soft.scale * exponential<T>(widen(value), soft.shift); };
  // The thread that writes the target's element writes it once more: the others need not look for it.
  const i64 writer = t < before ? t : t < behind ? (t - before) / kCount : t - behind;
  const bool writes_target = counts && writer % blockDim.x == threadIdx.x;
  const T own = writes_target ? row[t] : T{};
  for (i64 j = threadIdx.x; j < before; j += blockDim.x) to[j] = counts ? cast<T>(slope(row[j])) : T{};
  Pack16<T>* const body = (Pack16<T>*)(to + before);
  if (counts) {
#pragma unroll 4
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
      Pack16<T> pack = kKeeps ? kept[i] : ((const Pack16<T>*)(row + before))[i];
#pragma unroll
      for (int j = 0; j < kCount; ++j) pack.at[j] = cast<T>(slope(pack.at[j]));
      body[i] = pack;
    }
  } else {
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) body[i] = Pack16<T>{};
  }
  for (i64 j = behind + threadIdx.x; j < length; j += blockDim.x) to[j] = counts ? cast<T>(slope(row[j])) : T{};
  if (writes_target) to[t] = cast<T>(slope(own) - g);
}

template <class T>
__global__ void __launch_bounds__(512)
    cross_entropy_of_rows(const T* x, const i64* target, double* lse, Compute<T>* losses, i64 rows, i64 length,
                          i64 x_row, i64 ignore_index, Fault* fault, i64 op) {
  for (i64 line = blockIdx.x; line < rows; line += gridDim.x) {
    const T* const row = x + line * x_row;
    const MostAndSum<T> all = sums_of_row<T, false>(row, length, nullptr);
    if (threadIdx.x != 0) continue;
    const double found = logsumexp(all);
    lse[line] = found;
    losses[line] = loss_of_row(row, length, target[line], found, ignore_index, line, fault, op);
  }
}
// Bytes that the block will read soon begin their way from memory.
__device__ __forceinline__ void prefetch(const void* from, i64 bytes) {
  for (i64 at = threadIdx.x * 128ll; at < bytes; at += blockDim.x * 128ll)
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)from + at));
}
// Both ways: the block keeps a row in shared memory, or reads it again while it is in the cache. The next row is
// fetched while this one is written. dx may be x; without dloss, that is 1.
template <class T, bool kKeeps>
__global__ void __launch_bounds__(512, kKeeps ? 2 : 3)
    cross_entropy_and_slopes(const Compute<T>* dloss, const T* x, const i64* target, const double* divisor, double* lse,
                             Compute<T>* losses, T* dx, i64 rows, i64 length, i64 x_row, i64 dx_row, i64 ignore_index,
                             i64 each, Fault* fault, i64 op) {
  typedef Compute<T> C;
  extern __shared__ Unit16 room[];
  Pack16<T>* const kept = (Pack16<T>*)room;
  __shared__ double found;
  for (i64 line = blockIdx.x; line < rows; line += gridDim.x) {
    const T* const row = x + line * x_row;
    const MostAndSum<T> all = sums_of_row<T, kKeeps>(row, length, kept);
    const i64 t = target[line];
    if (kKeeps && line + gridDim.x < rows) prefetch(row + gridDim.x * x_row, length * (i64)sizeof(T));
    if (threadIdx.x == 0) {
      found = logsumexp(all);
      lse[line] = found;
      losses[line] = loss_of_row(row, length, t, found, ignore_index, line, fault, op);
    }
    __syncthreads();  // and the loss was read, where the gradient now goes
    const bool counts = t != ignore_index;
    if (counts && (t < 0 || t >= length)) continue;
    const double whole = dloss ? (double)dloss[each ? line : 0] : 1.0, by = divisor ? *divisor : 1.0;
    write_slopes<T, kKeeps>(row, dx + line * dx_row, length, t, counts, counts ? (C)(whole / by) : C(0), found, kept);
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
    write_slopes<T, false>(x + line * x_row, dx + line * dx_row, length, t, counts, g, lse[line], nullptr);
  }
}
