// Elements picked and placed by index. An index out of range is reported, and nothing is read or written for it.
struct Picked {
  i64 outer, length, inner, count;  // x is [outer, length, inner], the list [outer, count, inner]
  i64 first, total;                 // of a part of a table: its first row, and the rows of the whole; 0: it is whole
  i64 padding;                      // a row that gets nothing; -1: none
  Fault* fault;
  i64 row;
};
// Whether row `at` of the list has a place here; reports one that has none anywhere.
__device__ __forceinline__ bool find_row(const Picked& p, const i64* index, i64 at, i64& row) {
  const i64 bound = p.total > 0 ? p.total : p.length;
  row = index[at];
  if (row < 0 || row >= bound) {
    report(p.fault, (i32)p.row, at, row, bound);
    return false;
  }
  row -= p.first;
  return row >= 0 && row < p.length;
}
template <class T>
__global__ void take_rows(const T* x, const i64* index, T* out, const Picked p) {
  FOR_EACH_ELEMENT(i, p.outer * p.count * p.inner) {
    const i64 column = i % p.inner, at = i / p.inner % p.count, outer = i / p.inner / p.count;
    i64 row;
    out[i] = find_row(p, index, at, row) ? x[(outer * p.length + row) * p.inner + column] : T();
  }
}
template <class T>
__global__ void put_rows(T* x, const i64* index, const T* list, const T fill, i64 fills, const Picked p) {
  // Among equal indices the last one wins, as on the CPU: a thread looks whether a later one exists.
  FOR_EACH_ELEMENT(i, p.outer * p.count * p.inner) {
    const i64 column = i % p.inner, at = i / p.inner % p.count, outer = i / p.inner / p.count;
    i64 row;
    if (!find_row(p, index, at, row)) continue;
    bool last = true;
    if (!fills) {
      for (i64 later = at + 1; later < p.count && last; ++later) last = index[later] != index[at];
    }
    if (last) x[(outer * p.length + row) * p.inner + column] = fills ? fill : list[i];
  }
}
template <class T>
__device__ __forceinline__ T added(T a, T b) {
  if constexpr (IsComplex<T>::value) {
    return T{a.re + b.re, a.im + b.im};
  } else {
    return (T)(a + b);
  }
}
template <class T>
__device__ __forceinline__ T multiplied(T a, T b) {
  if constexpr (IsComplex<T>::value) {
    return T{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  } else {
    return (T)(a * b);
  }
}
template <class>
__global__ void count_rows(const i64* index, i32* counts, const Picked p) {
  FOR_EACH_ELEMENT(at, p.count) {
    i64 row;
    if (find_row(p, index, at, row)) atomicAdd(&counts[row], 1);
  }
}
// A block per kRowsOfBlock rows of x: it leaves the places of the list's entries for each of them one behind the other,
// in the order of the list, from starts[row] on. taken: how much of `places` has been given away.
static const int kRowsOfBlock = 96;
template <class>
__global__ void __launch_bounds__(1024)
    order_rows(const i64* index, const i32* counts, i64* starts, i64* places, u64* taken, const Picked p) {
  __shared__ i64 next[kRowsOfBlock];
  __shared__ i64 total;
  __shared__ i32 found[1024];
  __shared__ i32 warps[33];
  const i64 first = blockIdx.x * (i64)kRowsOfBlock;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < kRowsOfBlock) next[threadIdx.x] = first + threadIdx.x < p.length ? counts[first + threadIdx.x] : 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    total = 0;
    for (int k = 0; k < kRowsOfBlock; ++k) total += next[k];
    i64 at = total > 0 ? (i64)atomicAdd((unsigned long long*)taken, (unsigned long long)total) : 0;
    for (int k = 0; k < kRowsOfBlock; ++k) {
      const i64 count = next[k];
      next[k] = at;
      if (first + k < p.length) starts[first + k] = at;
      at += count;
    }
  }
  __syncthreads();
  i64 done = 0;
  for (i64 begin = 0; begin < p.count && done < total; begin += 1024) {
    const i64 at = begin + threadIdx.x, row = at < p.count ? index[at] - p.first - first : -1;
    const bool hit = row >= 0 && row < kRowsOfBlock && first + row < p.length;
    const u32 votes = __ballot_sync(0xffffffffu, hit);
    if (lane == 0) warps[warp + 1] = __popc(votes);
    if (!__syncthreads_or(hit)) continue;
    if (threadIdx.x == 0) {
      warps[0] = 0;
      for (int k = 1; k < 33; ++k) warps[k] += warps[k - 1];
    }
    __syncthreads();
    if (hit) found[warps[warp] + __popc(votes & ((1u << lane) - 1))] = (i32)(row << 10) | (i32)threadIdx.x;
    const i32 hits = warps[32];
    __syncthreads();
    if (threadIdx.x == 0) {
      for (i32 k = 0; k < hits; ++k) places[next[found[k] >> 10]++] = begin + (found[k] & 1023);
    }
    done += hits;
    __syncthreads();
  }
}
// x[row] += alpha * sum of the list's rows for it, in the order of the list: a block per row of x. So the sum has the
// same bits every time.
template <class T, class L>
__global__ void add_rows(T* x, const L* list, const i32* counts, const i64* starts, const i64* places, T alpha,
                         const Picked p) {
  for (i64 place = blockIdx.x; place < p.outer * p.length; place += gridDim.x) {
    const i64 row = place % p.length, outer = place / p.length;
    const i32 wanted = counts[row];
    if (wanted == 0 || row + p.first == p.padding) continue;
    const i64* const from = places + starts[row];
    for (i64 column = threadIdx.x; column < p.inner; column += blockDim.x) {
      T sum = x[place * p.inner + column];
#pragma unroll 4
      for (i32 k = 0; k < wanted; ++k)
        sum = added(sum, multiplied(alpha, cast<T>(list[(outer * p.count + from[k]) * p.inner + column])));
      x[place * p.inner + column] = sum;
    }
  }
}

// ---- an index per element: a line of the index along the dimension is one thread's, in order

struct Gathered {
  i64 dims, dim, elems, lines, bound;
  i64 sizes[8];  // of the index
  i64 x_strides[8], index_strides[8], list_strides[8];
  Fault* fault;
  i64 row;
};
template <class T>
__global__ void gather_elements(const T* x, const i64* index, T* out, const Gathered g) {
  FOR_EACH_ELEMENT(i, g.elems) {
    i64 rest = i, from = 0, which = 0;
    for (int d = (int)g.dims - 1; d >= 0; --d) {
      const i64 next = rest / g.sizes[d], at = rest - next * g.sizes[d];
      if (d != g.dim) from += at * g.x_strides[d];
      which += at * g.index_strides[d];
      rest = next;
    }
    const i64 row = index[which];
    if (row < 0 || row >= g.bound) {
      report(g.fault, (i32)g.row, i, row, g.bound);
      continue;
    }
    out[i] = x[from + row * g.x_strides[g.dim]];
  }
}
// kAdds: x += list; otherwise x becomes the list's element, or `fill`.
template <class T, bool kAdds>
__global__ void scatter_elements(T* x, const i64* index, const T* list, const T fill, i64 fills, const Gathered g) {
  FOR_EACH_ELEMENT(line, g.lines) {
    i64 rest = line, to = 0, which = 0, from = 0;
    for (int d = (int)g.dims - 1; d >= 0; --d) {
      if (d == g.dim) continue;
      const i64 next = rest / g.sizes[d], at = rest - next * g.sizes[d];
      to += at * g.x_strides[d];
      which += at * g.index_strides[d];
      from += at * g.list_strides[d];
      rest = next;
    }
    for (i64 k = 0; k < g.sizes[g.dim]; ++k) {
      const i64 row = index[which + k * g.index_strides[g.dim]];
      if (row < 0 || row >= g.bound) {
        report(g.fault, (i32)g.row, line, row, g.bound);
        continue;
      }
      T& place = x[to + row * g.x_strides[g.dim]];
      const T value = fills ? fill : list[from + k * g.list_strides[g.dim]];
      if constexpr (kAdds) {
        place = added(place, value);
      } else {
        place = value;
      }
    }
  }
}

// ---- x[i0, i1, …]: a tensor of indices for some of the dimensions (kernel/index_layout.h)

struct Places {
  i64 elems, dims, x_dims;
  i64 sizes[8];                  // of what is picked
  i64 x_sizes[8], x_strides[8];  // of x
  i64 from[8];                   // for each dimension of x the one of the picked that it is, or -1: an index
  const i64* index[8];
  i64 steps[8][8];  // of an index along the dimensions of what is picked
  Fault* fault;
  i64 row;
};
// Where element i of what is picked lies in x; -1 where an index is out of range. Negative ones count from the end.
__device__ __forceinline__ i64 place_of(const Places& p, i64 i) {
  i64 at[8], rest = i;
  for (int d = (int)p.dims - 1; d >= 0; --d) {
    at[d] = rest % p.sizes[d];
    rest /= p.sizes[d];
  }
  i64 place = 0;
  for (int d = 0; d < (int)p.x_dims; ++d) {
    if (p.from[d] >= 0) {
      place += at[p.from[d]] * p.x_strides[d];
      continue;
    }
    i64 where = 0;
    for (int k = 0; k < (int)p.dims; ++k) where += at[k] * p.steps[d][k];
    const i64 index = p.index[d][where], found = index < 0 ? index + p.x_sizes[d] : index;
    if (found < 0 || found >= p.x_sizes[d]) {
      report(p.fault, (i32)p.row, where, index, p.x_sizes[d]);
      return -1;
    }
    place += found * p.x_strides[d];
  }
  return place;
}
template <class U>
__global__ void take_places(const U* x, U* out, const Places p) {
  FOR_EACH_ELEMENT(i, p.elems) {
    const i64 place = place_of(p, i);
    out[i] = place < 0 ? U() : x[place];
  }
}
// Among equal places the last one wins: winners[place] = its number + 1.
template <int kUnused>
__global__ void win_places(u64* winners, const Places p) {
  FOR_EACH_ELEMENT(i, p.elems) {
    const i64 place = place_of(p, i);
    if (place >= 0) atomicMax((unsigned long long*)winners + place, (unsigned long long)i + 1);
  }
}
template <class U>
__global__ void put_places(U* x, const U* list, const u64* winners, const Places p) {
  FOR_EACH_ELEMENT(i, p.elems) {
    const i64 place = place_of(p, i);
    if (place >= 0 && winners[place] == (u64)i + 1) x[place] = list[i];
  }
}
// Sorted by place (order.h), elements for one place follow each other in the order of the list.
struct PlacedEntry {
  u64 place, number;
};
template <int kUnused>
__global__ void name_places(PlacedEntry* entries, i64 width, const Places p) {
  FOR_EACH_ELEMENT(i, width) {
    const i64 place = i < p.elems ? place_of(p, i) : -1;
    entries[i] = {place < 0 ? ~0ull : (u64)place, (u64)i};
  }
}
template <class T>
__global__ void add_places(T* x, const T* list, const PlacedEntry* entries, i64 count) {
  FOR_EACH_ELEMENT(i, count) {
    const u64 place = entries[i].place;
    if (place == ~0ull || (i > 0 && entries[i - 1].place == place)) continue;
    T sum = x[place];
    for (i64 k = i; k < count && entries[k].place == place; ++k) sum = added(sum, list[entries[k].number]);
    x[place] = sum;
  }
}
