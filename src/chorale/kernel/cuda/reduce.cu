// Reductions. A fold has an accumulator A, what it starts from, how an element of type T and its place go in, how two
// accumulators become one, and what comes out.
struct Reduction {  // strides in elements
  const void* in;
  void* out;
  void* partial;
  i64 results, count;  // of elements per result
  i64 kept_dims, reduced_dims;
  i64 kept_sizes[8], kept_strides[8];
  i64 reduced_sizes[8], reduced_strides[8];
  i64 flat_strides[8];  // of the reduced dimensions in the flattened tensor
  i64 chunks;           // in which the elements of a result are folded apart
  double p;             // of a norm; the correction of a variance
};
__device__ __forceinline__ i64 place_of(i64 i, i64 dims, const i64* sizes, const i64* strides) {
  i64 at = 0;
  for (int d = (int)dims - 1; d > 0; --d) {
    const i64 next = i / sizes[d];
    at += (i - next * sizes[d]) * strides[d];
    i = next;
  }
  return dims > 0 ? at + i * strides[0] : at;
}

template <class T>
struct Wide {  // of what is summed
  typedef T Type;
};
template <>
struct Wide<f16> {
  typedef float Type;
};
template <>
struct Wide<bf16> {
  typedef float Type;
};
template <>
struct Wide<bool> {
  typedef i64 Type;
};
template <>
struct Wide<u8> {
  typedef i64 Type;
};
template <>
struct Wide<i8> {
  typedef i64 Type;
};
template <>
struct Wide<i16> {
  typedef i64 Type;
};
template <>
struct Wide<i32> {
  typedef i64 Type;
};

template <class T>
__device__ __forceinline__ T plus(T a, T b) {
  if constexpr (IsComplex<T>::value) {
    return T{a.re + b.re, a.im + b.im};
  } else {
    return a + b;
  }
}
template <class T>
__device__ __forceinline__ T times(T a, T b) {
  if constexpr (IsComplex<T>::value) {
    return T{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  } else {
    return a * b;
  }
}

template <class T, class O>
struct Sum {
  typedef typename Wide<T>::Type A;
  static __device__ A start() { return A(); }
  static __device__ void add(A& a, T x, i64, const Reduction&) { a = plus(a, cast<A>(x)); }
  static __device__ void join(A& a, const A& b) { a = plus(a, b); }
  static __device__ O finish(const A& a, const Reduction&) { return cast<O>(a); }
};
template <class T, class O>
struct Mean : Sum<T, O> {
  typedef typename Wide<T>::Type A;
  static __device__ O finish(const A& a, const Reduction& r) {
    if constexpr (IsComplex<A>::value) {
      typedef decltype(A().re) R;
      return cast<O>(A{a.re / (R)r.count, a.im / (R)r.count});
    } else {
      return cast<O>(a / (A)r.count);
    }
  }
};
template <class T, class O>
struct Product {
  typedef typename Wide<T>::Type A;
  static __device__ A start() { return cast<A>((i64)1); }
  static __device__ void add(A& a, T x, i64, const Reduction&) { a = times(a, cast<A>(x)); }
  static __device__ void join(A& a, const A& b) { a = times(a, b); }
  static __device__ O finish(const A& a, const Reduction&) { return cast<O>(a); }
};
// The largest (kSign 1) or smallest (-1) with its place; the first of equal ones, NaN before all.
template <class T, class O, int kSign>
struct Extreme {
  typedef Compute<T> C;
  struct A {
    C value;
    i64 place;  // -1: none yet
  };
  static __device__ bool better(C a, C b) { return kSign > 0 ? a > b : a < b; }
  static __device__ A start() { return A{C(0), -1}; }
  static __device__ void join(A& a, const A& b) {
    if (b.place < 0) return;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a.place < 0 || (b_nan && !a_nan) ||
        (a_nan == b_nan && (better(b.value, a.value) || ((a_nan || a.value == b.value) && b.place < a.place))))
      a = b;
  }
  static __device__ void add(A& a, T x, i64 place, const Reduction&) { join(a, A{widen(x), place}); }
  static __device__ O finish(const A& a, const Reduction&) { return cast<O>(a.value); }
};
template <class T, class O>
using Largest = Extreme<T, O, 1>;
template <class T, class O>
using Smallest = Extreme<T, O, -1>;
template <class T, int kSign>
struct Place : Extreme<T, i64, kSign> {
  typedef typename Extreme<T, i64, kSign>::A A;
  static __device__ i64 finish(const A& a, const Reduction&) { return a.place; }
};
template <class T, class O>
using LargestPlace = Place<T, 1>;
template <class T, class O>
using SmallestPlace = Place<T, -1>;
template <class T, class O>
struct Any {
  typedef int A;
  static __device__ A start() { return 0; }
  static __device__ void add(A& a, T x, i64, const Reduction&) { a |= cast<bool>(x) ? 1 : 0; }
  static __device__ void join(A& a, const A& b) { a |= b; }
  static __device__ O finish(const A& a, const Reduction&) { return a != 0; }
};
template <class T, class O>
struct All {
  typedef int A;
  static __device__ A start() { return 1; }
  static __device__ void add(A& a, T x, i64, const Reduction&) { a &= cast<bool>(x) ? 1 : 0; }
  static __device__ void join(A& a, const A& b) { a &= b; }
  static __device__ O finish(const A& a, const Reduction&) { return a != 0; }
};
template <class T, class O>
struct Nonzero {
  typedef i64 A;
  static __device__ A start() { return 0; }
  static __device__ void add(A& a, T x, i64, const Reduction&) { a += cast<bool>(x) ? 1 : 0; }
  static __device__ void join(A& a, const A& b) { a += b; }
  static __device__ O finish(const A& a, const Reduction&) { return cast<O>(a); }
};
template <class T>
__device__ __forceinline__ auto size_of_number(T x) {
  if constexpr (IsComplex<T>::value) {
    return ::hypot(x.re, x.im);
  } else {
    return ::fabs(widen(x));
  }
}
template <class T, class O>
struct Norm {
  typedef decltype(size_of_number(T())) A;
  static __device__ A start() { return A(0); }
  static __device__ void add(A& a, T x, i64, const Reduction& r) {
    const A size = size_of_number(x);
    if (r.p == 2) {
      a += size * size;
    } else if (r.p == 1) {
      a += size;
    } else if (r.p == 0) {
      a += size != 0 ? A(1) : A(0);
    } else {
      a += ::pow(size, (A)r.p);
    }
  }
  static __device__ void join(A& a, const A& b) { a += b; }
  static __device__ O finish(const A& a, const Reduction& r) {
    return cast<O>(r.p == 2 ? ::sqrt(a) : r.p == 1 || r.p == 0 ? a : ::pow(a, (A)(1 / r.p)));
  }
};
template <class T, class O>
struct LargestSize {
  typedef decltype(size_of_number(T())) A;
  static __device__ A start() { return A(0); }
  static __device__ void add(A& a, T x, i64, const Reduction&) { a = Larger::of(a, size_of_number(x)); }
  static __device__ void join(A& a, const A& b) { a = Larger::of(a, b); }
  static __device__ O finish(const A& a, const Reduction&) { return cast<O>(a); }
};
template <class T, class O>
struct SmallestSize {
  typedef decltype(size_of_number(T())) A;
  static __device__ A start() { return A(1) / A(0); }
  static __device__ void join(A& a, const A& b) { a = a != a ? a : (b != b ? b : (b < a ? b : a)); }
  static __device__ void add(A& a, T x, i64, const Reduction&) { join(a, size_of_number(x)); }
  static __device__ O finish(const A& a, const Reduction&) { return cast<O>(a); }
};
template <class T, class O, bool kRoot>
struct Spread {  // Welford's, joined as Chan's
  typedef Compute<T> C;
  struct A {
    C mean, squares;
    i64 count;
  };
  static __device__ A start() { return A{C(0), C(0), 0}; }
  static __device__ void add(A& a, T x, i64, const Reduction&) {
    const C value = widen(x), delta = value - a.mean;
    a.mean += delta / (C)++a.count;
    a.squares += delta * (value - a.mean);
  }
  static __device__ void join(A& a, const A& b) {
    if (b.count == 0) return;
    const C total = (C)(a.count + b.count), delta = b.mean - a.mean;
    a.squares += b.squares + delta * delta * ((C)a.count * (C)b.count / total);
    a.mean += delta * ((C)b.count / total);
    a.count += b.count;
  }
  static __device__ O finish(const A& a, const Reduction& r) {
    const C divisor = (C)r.count - (C)r.p, variance = a.squares / (divisor > 0 ? divisor : C(0));
    return cast<O>(kRoot ? ::sqrt(variance) : variance);
  }
};
template <class T, class O>
using Variance = Spread<T, O, false>;
template <class T, class O>
using Deviation = Spread<T, O, true>;
template <class T, class O>
struct LogSumExp {
  typedef Compute<T> C;
  struct A {
    C most, sum;  // of exp(x - most)
  };
  static __device__ A start() { return A{-C(1) / C(0), C(0)}; }
  static __device__ void join(A& a, const A& b) {
    const C most = Larger::of(a.most, b.most);
    const C here = a.most == most ? C(1) : ::exp(a.most - most), there = b.most == most ? C(1) : ::exp(b.most - most);
    a = A{most, a.sum * here + b.sum * there};
  }
  static __device__ void add(A& a, T x, i64, const Reduction&) { join(a, A{widen(x), C(1)}); }
  static __device__ O finish(const A& a, const Reduction&) {
    const C infinite = C(1) / C(0);
    return cast<O>(a.most == infinite || a.most == -infinite ? a.most : a.most + ::log(a.sum));
  }
};

// One block per result: its threads take elements in turn and are joined as a tree.
template <template <class, class> class Fold, class T, class O>
__global__ void reduce_rows(const Reduction r) {
  typedef Fold<T, O> F;
  typedef typename F::A A;
  __shared__ __align__(16) char memory[sizeof(A) * 256];
  A* const parts = (A*)memory;
  for (i64 result = blockIdx.x; result < r.results; result += gridDim.x) {
    const T* const from = (const T*)r.in + place_of(result, r.kept_dims, r.kept_sizes, r.kept_strides);
    A a = F::start();
    for (i64 i = threadIdx.x; i < r.count; i += blockDim.x) {
      F::add(a, from[place_of(i, r.reduced_dims, r.reduced_sizes, r.reduced_strides)],
             place_of(i, r.reduced_dims, r.reduced_sizes, r.flat_strides), r);
    }
    parts[threadIdx.x] = a;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) F::join(parts[threadIdx.x], parts[threadIdx.x + half]);
      __syncthreads();
    }
    if (threadIdx.x == 0) ((O*)r.out)[result] = F::finish(parts[0], r);
    __syncthreads();
  }
}
// One thread per result and chunk of its elements: where neighbours in memory belong to different results.
template <template <class, class> class Fold, class T, class O>
__global__ void reduce_columns(const Reduction r) {
  typedef Fold<T, O> F;
  typedef typename F::A A;
  const i64 chunk = blockIdx.y, step = (r.count + r.chunks - 1) / r.chunks;
  const i64 begin = chunk * step, end = begin + step < r.count ? begin + step : r.count;
  FOR_EACH_ELEMENT(result, r.results) {
    const T* const from = (const T*)r.in + place_of(result, r.kept_dims, r.kept_sizes, r.kept_strides);
    A a = F::start();
#pragma unroll 8
    for (i64 i = begin; i < end; ++i) {
      F::add(a, from[place_of(i, r.reduced_dims, r.reduced_sizes, r.reduced_strides)],
             place_of(i, r.reduced_dims, r.reduced_sizes, r.flat_strides), r);
    }
    if (r.chunks == 1) {
      ((O*)r.out)[result] = F::finish(a, r);
    } else {
      ((A*)r.partial)[chunk * r.results + result] = a;
    }
  }
}
template <template <class, class> class Fold, class T, class O>
__global__ void join_chunks(const Reduction r) {
  typedef Fold<T, O> F;
  typedef typename F::A A;
  FOR_EACH_ELEMENT(result, r.results) {
    A a = ((const A*)r.partial)[result];
    for (i64 chunk = 1; chunk < r.chunks; ++chunk) F::join(a, ((const A*)r.partial)[chunk * r.results + result]);
    ((O*)r.out)[result] = F::finish(a, r);
  }
}
