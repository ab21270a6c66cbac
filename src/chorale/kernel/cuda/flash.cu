// Attention without scores in memory, for f16 and bf16: a block works on 64 queries or keys, a warp on 16 of them, and
// walks over the others 64 at a time. Products are those of tensor cores (16 x 8 x 16, sums in f32). What a thread
// holds of a result [16, 8]: rows g and g + 8, columns 2 t and 2 t + 1, with g = lane / 4 and t = lane % 4; the same as
// of a left factor.
struct Matrices {  // the last dimension is contiguous; strides in elements
  void* data;
  i64 row;
  i64 lead[8];
};
struct Flash {
  i64 queries, keys, causal, lead_dims, group;  // heads of queries that share one of keys
  i64 lead_sizes[8];                            // of queries
  float scale;
  Matrices q, k, v, out, dout, dq, dk, dv;
  float* lse;
  float* delta;
};
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
constexpr float kLog2E = 1.4426950408889634f;

template <class T>
__device__ __forceinline__ T* matrix_of(const Matrices& m, const Flash& f, i64 head, i64 group) {
  i64 at = 0;
  for (int d = (int)f.lead_dims - 1; d >= 0; --d) {
    i64 index = head % f.lead_sizes[d];
    head /= f.lead_sizes[d];
    if (d == (int)f.lead_dims - 1) index /= group;
    at += index * m.lead[d];
  }
  return (T*)m.data + at;
}
__device__ __forceinline__ void multiply_add(float* c, const u32* a, u32 b0, u32 b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add(float* c, const u32* a, u32 b0, u32 b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T>
__device__ __forceinline__ u32 packed(float low, float high) {
  return (u32)cast<T>(low).bits | (u32)cast<T>(high).bits << 16;
}

// 64 rows of D elements, padded so that neither rows nor columns meet in a bank.
template <class T, int D>
struct Tile {
  static const int kRow = D + 8;
  T* at;
  __device__ __forceinline__ u32 pair(int row, int column) const { return *(const u32*)(at + row * kRow + column); }
  // Rows [first, first + 64) of a matrix; those from `rows` on are zero.
  __device__ void load(const T* from, i64 row_stride, i64 first, i64 rows) const {
    for (int i = threadIdx.x; i < 64 * D / 8; i += 128) {
      const int row = i / (D / 8), column = i % (D / 8) * 8;
      uint4 bytes = {0, 0, 0, 0};
      if (first + row < rows) bytes = *(const uint4*)(from + (first + row) * row_stride + column);
      *(uint4*)(at + row * kRow + column) = bytes;
    }
  }
  // A left factor: rows [row, row + 16), all columns.
  __device__ __forceinline__ void left(int row, u32 (*a)[4]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      a[k][0] = pair(row + g, k * 16 + t * 2);
      a[k][1] = pair(row + g + 8, k * 16 + t * 2);
      a[k][2] = pair(row + g, k * 16 + 8 + t * 2);
      a[k][3] = pair(row + g + 8, k * 16 + 8 + t * 2);
    }
  }
};
// c [16, 64] = a [16, D] times the transpose of a tile [64, D].
template <class T, int D>
__device__ __forceinline__ void times_turned(const u32 (*a)[4], const Tile<T, D>& b, float (*c)[4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      multiply_add(c[n], a[k], b.pair(n * 8 + g, k * 16 + t * 2), b.pair(n * 8 + g, k * 16 + 8 + t * 2), T());
  }
}
// c [16, D] += p [16, 64], as times_turned left it, times a tile [64, D].
template <class T, int D>
__device__ __forceinline__ void add_times(const float (*p)[4], const Tile<T, D>& b, float (*c)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const u32 a[4] = {packed<T>(p[2 * j][0], p[2 * j][1]), packed<T>(p[2 * j][2], p[2 * j][3]),
                      packed<T>(p[2 * j + 1][0], p[2 * j + 1][1]), packed<T>(p[2 * j + 1][2], p[2 * j + 1][3])};
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      u32 b0, b1;
      const u32 address = (u32)__cvta_generic_to_shared(b.at + (j * 16 + lane % 16) * Tile<T, D>::kRow + n * 8);
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(address));
      multiply_add(c[n], a, b0, b1, T());
    }
  }
}
// Rows of c [16, D], scaled, to memory.
template <class T, int D>
__device__ __forceinline__ void store_rows(T* to, i64 row_stride, i64 first, i64 rows, const float (*c)[4], float low,
                                           float high) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    if (first + g < rows)
      *(u32*)(to + (first + g) * row_stride + n * 8 + t * 2) = packed<T>(c[n][0] * low, c[n][1] * low);
    if (first + g + 8 < rows)
      *(u32*)(to + (first + g + 8) * row_stride + n * 8 + t * 2) = packed<T>(c[n][2] * high, c[n][3] * high);
  }
}
__device__ __forceinline__ float over_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float over_quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class T, int D>
__global__ void __launch_bounds__(128) flash_forward(const Flash f) {
  __shared__ __align__(16) T memory[2][64 * (D + 8)];
  const Tile<T, D> keys{memory[0]}, values{memory[1]};
  const i64 head = blockIdx.y, first = (gridDim.x - 1 - blockIdx.x) * 64ll;  // long rows of causal attention first
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* const k = matrix_of<T>(f.k, f, head, f.group);
  const T* const v = matrix_of<T>(f.v, f, head, f.group);
  u32 q[D / 16][4];
  keys.load(matrix_of<T>(f.q, f, head, 1), f.q.row, first, f.queries);
  __syncthreads();
  keys.left(warp * 16, q);
  float o[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const i64 row = first + warp * 16 + g;
  const i64 end = f.causal && first + 64 < f.keys ? first + 64 : f.keys;
  const float scale = f.scale * kLog2E;
  for (i64 begin = 0; begin < end; begin += 64) {
    __syncthreads();
    keys.load(k, f.k.row, begin, f.keys);
    values.load(v, f.v.row, begin, f.keys);
    __syncthreads();
    float s[8][4];
    times_turned(q, keys, s);
    const bool whole = begin + 64 <= f.keys && (!f.causal || begin + 63 <= first);
    float top[2] = {most[0], most[1]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] *= scale;
        if (!whole) {
          const i64 key = begin + n * 8 + t * 2 + i % 2;
          if (key >= f.keys || (f.causal && key > row + i / 2 * 8)) s[n][i] = -INFINITY;
        }
        top[i / 2] = fmaxf(top[i / 2], s[n][i]);
      }
    }
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = over_quad_max(top[r]);
      keep[r] = top[r] == -INFINITY ? 1.0f : exp2f(most[r] - top[r]);
      most[r] = top[r];
      sum[r] *= keep[r];
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      o[n][0] *= keep[0];
      o[n][1] *= keep[0];
      o[n][2] *= keep[1];
      o[n][3] *= keep[1];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = most[i / 2] == -INFINITY ? 0.0f : exp2f(s[n][i] - most[i / 2]);
        sum[i / 2] += s[n][i];
      }
    }
    add_times(s, values, o);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = over_quad_sum(sum[r]);
  store_rows<T, D>(matrix_of<T>(f.out, f, head, 1), f.out.row, first + warp * 16, f.queries, o,
                   sum[0] > 0 ? 1 / sum[0] : 0.0f, sum[1] > 0 ? 1 / sum[1] : 0.0f);
  if (t == 0) {
    for (int r = 0; r < 2; ++r) {
      if (row + r * 8 < f.queries)
        f.lse[head * f.queries + row + r * 8] = sum[r] > 0 ? (most[r] + log2f(sum[r])) / kLog2E : -INFINITY;
    }
  }
}

// delta = sum(dout * out) - dlse of each query, a warp each.
template <class T, int D>
__global__ void flash_delta(const Flash f, const float* dlse, i64 heads) {
  const i64 row = blockIdx.x * 4ll + threadIdx.x / 32;
  if (row >= heads * f.queries) return;
  const i64 head = row / f.queries, query = row % f.queries;
  const T* const out = matrix_of<T>(f.out, f, head, 1) + query * f.out.row;
  const T* const dout = matrix_of<T>(f.dout, f, head, 1) + query * f.dout.row;
  float sum = 0;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum += widen(out[d]) * widen(dout[d]);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
  if (threadIdx.x % 32 == 0) f.delta[row] = sum - (dlse ? dlse[row] : 0.0f);
}

template <class T, int D>
__global__ void __launch_bounds__(128) flash_backward_queries(const Flash f) {
  __shared__ __align__(16) T memory[2][64 * (D + 8)];
  const Tile<T, D> keys{memory[0]}, values{memory[1]};
  const i64 head = blockIdx.y, first = (gridDim.x - 1 - blockIdx.x) * 64ll;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* const k = matrix_of<T>(f.k, f, head, f.group);
  const T* const v = matrix_of<T>(f.v, f, head, f.group);
  u32 q[D / 16][4], dout[D / 16][4];
  keys.load(matrix_of<T>(f.q, f, head, 1), f.q.row, first, f.queries);
  values.load(matrix_of<T>(f.dout, f, head, 1), f.dout.row, first, f.queries);
  __syncthreads();
  keys.left(warp * 16, q);
  values.left(warp * 16, dout);
  const i64 row = first + warp * 16 + g;
  float lse[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool there = row + r * 8 < f.queries;
    lse[r] = there ? f.lse[head * f.queries + row + r * 8] * kLog2E : -INFINITY;
    delta[r] = there ? f.delta[head * f.queries + row + r * 8] : 0.0f;
  }
  float dq[D / 8][4] = {};
  const i64 end = f.causal && first + 64 < f.keys ? first + 64 : f.keys;
  const float scale = f.scale * kLog2E;
  for (i64 begin = 0; begin < end; begin += 64) {
    __syncthreads();
    keys.load(k, f.k.row, begin, f.keys);
    values.load(v, f.v.row, begin, f.keys);
    __syncthreads();
    float s[8][4], dp[8][4];
    times_turned(q, keys, s);
    times_turned(dout, values, dp);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 key = begin + n * 8 + t * 2 + i % 2;
        const bool seen = key < f.keys && (!f.causal || key <= row + i / 2 * 8) && lse[i / 2] != -INFINITY;
        s[n][i] = seen ? exp2f(s[n][i] * scale - lse[i / 2]) * (dp[n][i] - delta[i / 2]) : 0.0f;
      }
    }
    add_times(s, keys, dq);
  }
  store_rows<T, D>(matrix_of<T>(f.dq, f, head, 1), f.dq.row, first + warp * 16, f.queries, dq, f.scale, f.scale);
}

// A block has 64 keys; it collects from all queries, of all heads that share these keys, in order.
template <class T, int D>
__global__ void __launch_bounds__(128) flash_backward_keys(const Flash f) {
  __shared__ __align__(16) T memory[2][64 * (D + 8)];
  __shared__ float lse[64], delta[64];
  const Tile<T, D> queries{memory[0]}, gradients{memory[1]};
  const i64 shared_head = blockIdx.y, first = blockIdx.x * 64ll;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32 k[D / 16][4], v[D / 16][4];
  queries.load(matrix_of<T>(f.k, f, shared_head * f.group, f.group), f.k.row, first, f.keys);
  gradients.load(matrix_of<T>(f.v, f, shared_head * f.group, f.group), f.v.row, first, f.keys);
  __syncthreads();
  queries.left(warp * 16, k);
  gradients.left(warp * 16, v);
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  const i64 row = first + warp * 16 + g;
  const float scale = f.scale * kLog2E;
  for (i64 head = shared_head * f.group; head < (shared_head + 1) * f.group; ++head) {
    const T* const q = matrix_of<T>(f.q, f, head, 1);
    const T* const dout = matrix_of<T>(f.dout, f, head, 1);
    for (i64 begin = f.causal ? first : 0; begin < f.queries; begin += 64) {
      __syncthreads();
      queries.load(q, f.q.row, begin, f.queries);
      gradients.load(dout, f.dout.row, begin, f.queries);
      if (threadIdx.x < 64) {
        const bool there = begin + threadIdx.x < f.queries;
        lse[threadIdx.x] = there ? f.lse[head * f.queries + begin + threadIdx.x] * kLog2E : -INFINITY;
        delta[threadIdx.x] = there ? f.delta[head * f.queries + begin + threadIdx.x] : 0.0f;
      }
      __syncthreads();
      float s[8][4], dp[8][4];
      times_turned(k, queries, s);
      times_turned(v, gradients, dp);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = n * 8 + t * 2 + i % 2;
          const bool seen = lse[at] != -INFINITY && (!f.causal || row + i / 2 * 8 <= begin + at);
          s[n][i] = seen ? exp2f(s[n][i] * scale - lse[at]) : 0.0f;
          dp[n][i] = s[n][i] * (dp[n][i] - delta[at]);
        }
      }
      add_times(s, gradients, dv);
      add_times(dp, queries, dk);
    }
  }
  store_rows<T, D>(matrix_of<T>(f.dk, f, shared_head * f.group, f.group), f.dk.row, first + warp * 16, f.keys, dk,
                   f.scale, f.scale);
  store_rows<T, D>(matrix_of<T>(f.dv, f, shared_head * f.group, f.group), f.dv.row, first + warp * 16, f.keys, dv, 1,
                   1);
}
