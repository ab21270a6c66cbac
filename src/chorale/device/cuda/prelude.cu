// What every kernel's text begins with. Read by NVRTC: no headers.
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};
template <class T>
struct Complex {
  T re, im;
};
typedef Complex<float> c64;
typedef Complex<double> c128;

__device__ __forceinline__ float widen(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
template <class T>
__device__ __forceinline__ T widen(T x) {
  return x;
}
// The instructions that make a pair are four times as fast as those that make one.
__device__ __forceinline__ f16 to_f16(float x) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  return f16{(unsigned short)pair};
}
__device__ __forceinline__ bf16 to_bf16(float x) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  return bf16{(unsigned short)pair};
}

// What a type is computed in.
template <class T>
struct ComputeOf {
  typedef T Type;
};
template <>
struct ComputeOf<f16> {
  typedef float Type;
};
template <>
struct ComputeOf<bf16> {
  typedef float Type;
};
template <class T>
using Compute = typename ComputeOf<T>::Type;

template <class T>
struct IsComplex {
  static const bool value = false;
};
template <class T>
struct IsComplex<Complex<T>> {
  static const bool value = true;
};
template <class A, class B>
struct IsSame {
  static const bool value = false;
};
template <class A>
struct IsSame<A, A> {
  static const bool value = true;
};
template <class T>
constexpr bool kIsFloating = IsSame<T, float>::value || IsSame<T, double>::value;

// A narrower integer takes the lower bits of the wide one.
template <class To, class From>
__device__ __forceinline__ To cast(From from_) {
  const auto from = widen(from_);
  typedef decltype(widen(from_)) F;
  if constexpr (IsSame<To, From>::value) {
    return from_;
  } else if constexpr (IsComplex<To>::value) {
    typedef decltype(To().re) R;
    if constexpr (IsComplex<From>::value) {
      return To{(R)from.re, (R)from.im};
    } else {
      return To{(R)from, R(0)};
    }
  } else if constexpr (IsComplex<From>::value) {
    if constexpr (IsSame<To, bool>::value) {
      return from.re != 0 || from.im != 0;
    } else {
      return cast<To>(from.re);
    }
  } else if constexpr (IsSame<To, f16>::value) {
    return to_f16((float)from);
  } else if constexpr (IsSame<To, bf16>::value) {
    return to_bf16((float)from);
  } else if constexpr (IsSame<To, bool>::value) {
    return from != F(0);
  } else if constexpr (IsSame<F, float>::value || IsSame<F, double>::value) {
    if constexpr (kIsFloating<To>) {
      return (To)from;
    } else {
      return (To)(i64)from;
    }
  } else {
    return (To)from;
  }
}

// Operands of any strides, walked in step: those of vec::StridedSpace (space.h). Strides are in bytes.
struct Space {
  i64 elems;
  i64 dims;
  i64 sizes[8];
  char* data[5];
  i64 strides[5][8];
};
template <int N>
__device__ __forceinline__ void offsets_at(const Space& s, i64 i, i64* offset) {
#pragma unroll
  for (int k = 0; k < N; ++k) offset[k] = 0;
  if (s.elems <= 0x7fffffff) {  // division of 32 bits is several times faster
    u32 rest = (u32)i;
    for (int d = (int)s.dims - 1; d > 0; --d) {
      const u32 size = (u32)s.sizes[d], next = rest / size, at = rest - next * size;
#pragma unroll
      for (int k = 0; k < N; ++k) offset[k] += at * s.strides[k][d];
      rest = next;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) offset[k] += rest * s.strides[k][0];
    return;
  }
  for (int d = (int)s.dims - 1; d > 0; --d) {
    const i64 next = i / s.sizes[d], at = i - next * s.sizes[d];
#pragma unroll
    for (int k = 0; k < N; ++k) offset[k] += at * s.strides[k][d];
    i = next;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) offset[k] += i * s.strides[k][0];
}

#define FOR_EACH_ELEMENT(i, n) \
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

template <class T>
struct alignas(sizeof(T)) Unit {
  T bytes;
};
struct alignas(16) Unit16 {
  u64 low, high;
};
// The neighbours that a thread reads and writes at once.
template <class T>
struct alignas(16) Pack16 {
  static const int kCount = 16 / sizeof(T);
  T at[kCount];
};
template <class T>
__device__ __forceinline__ Pack16<T> pack_at(const T* x, i64 at) {
  return *(const Pack16<T>*)(x + at);
}

template <class T>
__global__ void copy_space(const Space s) {
  FOR_EACH_ELEMENT(i, s.elems) {
    i64 at[2];
    offsets_at<2>(s, i, at);
    *(T*)(s.data[0] + at[0]) = *(const T*)(s.data[1] + at[1]);
  }
}
template <class T>
__global__ void fill_space(const Space s, const T value) {
  FOR_EACH_ELEMENT(i, s.elems) {
    i64 at[1];
    offsets_at<1>(s, i, at);
    *(T*)(s.data[0] + at[0]) = value;
  }
}

// A few elements, by one block.
template <class T>
__global__ void fill_few(T* to, u32 value, i64 count) {
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) to[i] = (T)value;
}

// The first error that a kernel finds in its data; the host looks at it when it waits (fault.h).
struct Fault {
  u32 taken;
  i32 row;
  i64 at, value, bound;
};
__device__ __forceinline__ void report(Fault* fault, i32 row, i64 at, i64 value, i64 bound) {
  if (atomicCAS_system(&fault->taken, 0u, 1u) != 0u) return;
  fault->row = row;
  fault->at = at;
  fault->value = value;
  fault->bound = bound;
  __threadfence_system();
  *(volatile u32*)&fault->taken = 2u;
}

// ---- sums and maxima over a block of up to 1024 threads; every thread gets the result

template <class T>
__device__ __forceinline__ T shuffled_down(T x, int by) {
  return __shfl_down_sync(0xffffffffu, x, by);
}
// Of a warp; every thread gets the result.
template <class T>
__device__ __forceinline__ T over_warp(T x) {
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
struct Plus {
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a + b;
  }
};
struct Larger {  // NaN wins
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a != a ? a : (b != b ? b : (a < b ? b : a));
  }
};
template <class Op, class T>
__device__ T over_block(T x, T identity) {
  __shared__ T parts[33];
  for (int by = 16; by > 0; by /= 2) x = Op::of(x, shuffled_down(x, by));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  if (warp == 0) {
    x = lane < (blockDim.x + 31) / 32 ? parts[lane] : identity;
    for (int by = 16; by > 0; by /= 2) x = Op::of(x, shuffled_down(x, by));
    if (lane == 0) parts[32] = x;
  }
  __syncthreads();
  x = parts[32];
  __syncthreads();
  return x;
}

// exp(x - lse) * scale is exp(x - shift) * this scale: Note [Exact logsumexp] in kernel/cpu/loss/cross_entropy.cc.
template <class C>
struct Shift {
  C shift, scale;

  __device__ __forceinline__ Shift(double lse, C scale_) : shift((C)lse), scale(scale_) {
    const double d = (double)shift - lse;
    if (d == d) scale = (C)(scale_ * (1 + d * (1 + d / 2)));  // NaN where both are infinite
  }
};

// ---- random words (base/philox.h)

__device__ __forceinline__ void philox(u64 seed, u64 counter, u32* words) {
  u32 x0 = (u32)counter, x1 = (u32)(counter >> 32), x2 = 0, x3 = 0;
  u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = (u64)0xD2511F53u * x0, p1 = (u64)0xCD9E8D57u * x2;
    x0 = (u32)(p1 >> 32) ^ x1 ^ key0;
    x1 = (u32)p1;
    x2 = (u32)(p0 >> 32) ^ x3 ^ key1;
    x3 = (u32)p0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  words[0] = x0;
  words[1] = x1;
  words[2] = x2;
  words[3] = x3;
}
__device__ __forceinline__ u32 random_word(u64 seed, u64 offset, u64 i) {
  u32 words[4];
  philox(seed, offset + i / 4, words);
  const u32 which = (u32)(i % 4);
  return which == 0 ? words[0] : which == 1 ? words[1] : which == 2 ? words[2] : words[3];
}
// kernel/stretch.h: seed, offset, and for a part where it begins and how long the whole is, by dimension.
struct Drawn {
  const i64* stretch;
  i64 step;    // between its elements
  i64 placed;  // whether it is a part
  i64 dims;
  i64 sizes[8];
};
__device__ __forceinline__ i64 whole_index(const Drawn& d, i64 at) {
  if (!d.placed) return at;
  i64 index = 0, stride = 1;
  for (int k = (int)d.dims - 1; k >= 0; --k) {
    index += (d.stretch[(2 + 2 * k) * d.step] + at % d.sizes[k]) * stride;
    stride *= d.stretch[(3 + 2 * k) * d.step];
    at /= d.sizes[k];
  }
  return index;
}
__device__ __forceinline__ u32 word_of(const Drawn& d, u64 i) {
  return random_word((u64)d.stretch[0], (u64)d.stretch[d.step], i);
}
