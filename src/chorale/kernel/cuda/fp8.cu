// Casts to numbers of 8 bits with their transposes, and products of those that cuBLASLt does not take.

__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

struct LargerBits {
  static __device__ __forceinline__ u32 of(u32 a, u32 b) { return a > b ? a : b; }
};

// The largest magnitude of what each block sees, as bits, of which those of infinity and NaN are the largest. Blocks
// begin at the end, where the cache has what was written last.
template <class T>
__global__ void fp8_largest(const T* x, const i64 n, u32* parts) {
  constexpr int kCount = Pack16<T>::kCount;
  const i64 packs = (u64)x % 16 == 0 ? n / kCount : 0;
  u32 most = 0;
  if constexpr (sizeof(T) == 2) {  // two at a time: their magnitudes are in the order of their bits
    u32 pair = 0;
    constexpr int kAhead = 4;  // loads that a thread waits for at once
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += kAhead * step) {
      Unit16 units[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const i64 at = i + a * step;
        units[a] = at < packs ? ((const Unit16*)x)[packs - 1 - at] : Unit16{0, 0};
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const u32 words[4] = {(u32)units[a].low, (u32)(units[a].low >> 32), (u32)units[a].high,
                              (u32)(units[a].high >> 32)};
#pragma unroll
        for (int k = 0; k < 4; ++k) pair = __vmaxu2(pair, words[k] & 0x7fff7fffu);
      }
    }
    most = LargerBits::of(magnitude_bits(widen(T{(unsigned short)(pair & 0xffff)})),
                          magnitude_bits(widen(T{(unsigned short)(pair >> 16)})));
  } else {
    FOR_EACH_ELEMENT(i, packs) {
      const Pack16<T> pack = pack_at(x, (packs - 1 - i) * kCount);
#pragma unroll
      for (int k = 0; k < kCount; ++k) most = LargerBits::of(most, magnitude_bits((float)widen(pack.at[k])));
    }
  }
  FOR_EACH_ELEMENT(i, n - packs * kCount) {
    most = LargerBits::of(most, magnitude_bits((float)widen(x[packs * kCount + i])));
  }
  most = over_block<LargerBits>(most, 0u);
  if (threadIdx.x == 0) parts[blockIdx.x] = most;
}

// Note [Scales of 8 bits] in kernel/fp8.h.
struct Fp8Scale {
  float up, down;
};
__device__ __forceinline__ Fp8Scale fp8_scale(u32 most, int most_exponent) {
  if (most >= 0x7f800000u) return {1.0f, __uint_as_float(0x7fc00000u)};
  if (most == 0) return {1.0f, 1.0f};
  int e = most_exponent - ((int)(most >> 23) - 127) - ((most & 0x7fffffu) > 0x600000u ? 1 : 0);
  e = e < 126 ? e : 126;
  return {__uint_as_float((u32)(127 + e) << 23), __uint_as_float((u32)(127 - e) << 23)};
}

// Four numbers as bytes, the first one lowest.
template <bool kGradient>
__device__ __forceinline__ u32 to_bytes(const float* x) {
  unsigned short low, high;
  if constexpr (kGradient) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  }
  return (u32)low | (u32)high << 16;
}
template <bool kGradient>
__device__ __forceinline__ float from_byte(u8 byte) {
  u32 pair;
  if constexpr (kGradient) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)byte));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)byte));
  }
  return widen(f16{(unsigned short)(pair & 0xffff)});
}

// x [rows, columns] as bytes in its own order and transposed, in squares of 128 by 128: a thread takes four rows of
// eight numbers, so that what it writes into the transposed square are words. `parts` is what fp8_largest found.
// kWhole: all squares are, and x is aligned.
template <class T, bool kGradient, bool kWhole>
__global__ void __launch_bounds__(256) fp8_cast(const T* x, const i64 rows, const i64 columns, const u32* parts,
                                                const i64 part_count, u8* straight, u8* turned, float* scale) {
  __shared__ u32 square[128][33];
  u32 most = 0;
  for (i64 i = threadIdx.x; i < part_count; i += blockDim.x) most = LargerBits::of(most, parts[i]);
  const Fp8Scale by = fp8_scale(over_block<LargerBits>(most, 0u), kGradient ? 15 : 8);
  if (blockIdx.x == 0 && threadIdx.x < 4) scale[threadIdx.x] = by.down;
  const i64 across = columns > 0 ? (columns + 127) / 128 : 1, row0 = blockIdx.x / across * 128,
            column0 = blockIdx.x % across * 128;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const i64 column = column0 + tx * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int quad = half * 16 + ty;
    u32 bytes[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const i64 row = row0 + quad * 4 + i;
      float v[8];
      if constexpr (kWhole) {
        constexpr int kCount = Pack16<T>::kCount;
#pragma unroll
        for (int p = 0; p < 8 / kCount; ++p) {
          const Pack16<T> pack = pack_at(x, row * columns + column + p * kCount);
#pragma unroll
          for (int k = 0; k < kCount; ++k) v[p * kCount + k] = (float)widen(pack.at[k]) * by.up;
        }
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[k] = row < rows && column + k < columns ? (float)widen(x[row * columns + column + k]) * by.up : 0.0f;
        }
      }
      bytes[i][0] = to_bytes<kGradient>(v);
      bytes[i][1] = to_bytes<kGradient>(v + 4);
      if constexpr (kWhole) {
        *(u64*)(straight + row * columns + column) = (u64)bytes[i][0] | (u64)bytes[i][1] << 32;
      } else {
        for (int k = 0; k < 8; ++k) {
          if (row < rows && column + k < columns)
            straight[row * columns + column + k] = (u8)(bytes[i][k / 4] >> (k % 4 * 8));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 low01 = __byte_perm(bytes[0][j], bytes[1][j], 0x5140),
                high01 = __byte_perm(bytes[0][j], bytes[1][j], 0x7362);
      const u32 low23 = __byte_perm(bytes[2][j], bytes[3][j], 0x5140),
                high23 = __byte_perm(bytes[2][j], bytes[3][j], 0x7362);
      u32(*const to)[33] = square + tx * 8 + j * 4;
      to[0][quad] = __byte_perm(low01, low23, 0x5410);
      to[1][quad] = __byte_perm(low01, low23, 0x7632);
      to[2][quad] = __byte_perm(high01, high23, 0x5410);
      to[3][quad] = __byte_perm(high01, high23, 0x7632);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int c = threadIdx.x / 32; c < 128; c += 8) {
    const u32 word = square[c][lane];
    u8* const to = turned + (column0 + c) * rows + row0 + lane * 4;
    if constexpr (kWhole) {
      *(u32*)to = word;
    } else {
      for (int k = 0; k < 4; ++k) {
        if (column0 + c < columns && row0 + lane * 4 + k < rows) to[k] = (u8)(word >> (k * 8));
      }
    }
  }
}

// c [m, n] = a b^T + bias for a [m, k] and b [n, k], times both scales. A thread makes a sum: this is for small sizes.
template <class T, bool kGradientA, bool kGradientB>
__global__ void fp8_product(const u8* a, const u8* b, const T* bias, T* c, const i64 m, const i64 n, const i64 k,
                            const float* a_scale, const float* b_scale) {
  FOR_EACH_ELEMENT(at, m * n) {
    const u8 *row = a + at / n * k, *column = b + at % n * k;
    float sum = 0;
    for (i64 i = 0; i < k; ++i) sum += from_byte<kGradientA>(row[i]) * from_byte<kGradientB>(column[i]);
    sum = sum * *a_scale * *b_scale;
    if (bias) sum += (float)widen(bias[at % n]);
    c[at] = cast<T>(sum);
  }
}
