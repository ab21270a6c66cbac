#include "chorale/kernel/cpu/product/small_product.h"

#include <algorithm>
#include <utility>

#include "chorale/base/parallel_for.h"
#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/product/small_product.cc"
#include <hwy/foreach_target.h>  // compiles the part below once per instruction set

#include <hwy/highway.h>

// Shape letters: A is M x K, B is K x N, C is M x N. C is cut into tiles of R rows and V vectors of columns that stay
// in registers while k runs: each step loads V vectors of B and broadcasts R elements of A. So A may have any strides,
// while rows of B and C must be contiguous; a B whose columns are contiguous is transposed into a buffer first.

#ifndef CHORALE_KERNEL_CPU_SMALL_PRODUCT_ONCE
#define CHORALE_KERNEL_CPU_SMALL_PRODUCT_ONCE
namespace chorale::kernel::cpu {
// Elements of B that are packed on the stack at most: 32 KiB of f64.
inline constexpr int64_t kMaxPacked = 4096;

template <class T>
struct SmallProduct {
  int64_t m, n, k;
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t b_row, b_col;
  T* c;
  int64_t c_row, c_col;
  const T* bias;
  bool bias_is_scalar;  // else it has n values
  T alpha, beta;
  bool relu;
  bool by_dots;  // M is 1 and B has contiguous columns
};
}  // namespace chorale::kernel::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// AVX-512 has 32 registers, others 16.
constexpr size_t kMaxRows = HWY_TARGET <= HWY_AVX3 ? 8 : 4;
// Where masked loads may touch bytes past the end, remaining columns are done one by one.
constexpr bool kMasks = !HWY_MEM_OPS_MIGHT_FAULT;

// Rows i .. i + R and V vectors of columns from j on; of the last vector only `last` lanes if kPartial.
template <size_t R, size_t V, bool kPartial, class D, class T = hn::TFromD<D>>
HWY_INLINE void tile(D d, const SmallProduct<T>& p, int64_t i, int64_t j, int64_t last) {
  using Vec = hn::Vec<D>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto mask = hn::FirstN(d, static_cast<size_t>(last));
  const auto partial = [](size_t v) { return kPartial && v == V - 1; };
  const T* a = p.a + i * p.a_row;
  const T* b = p.b + j;
  Vec sum[R][V];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < V; ++v) sum[r][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < p.k; ++k, a += p.a_col, b += p.b_row) {
    Vec row[V];
    HWY_UNROLL(8)
    for (size_t v = 0; v < V; ++v) {
      const T* at = b + static_cast<int64_t>(v) * lanes;
      row[v] = partial(v) ? hn::MaskedLoad(mask, d, at) : hn::LoadU(d, at);
    }
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) {
      const Vec x = hn::Set(d, a[static_cast<int64_t>(r) * p.a_row]);
      HWY_UNROLL(8)
      for (size_t v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(x, row[v], sum[r][v]);
    }
  }
  const Vec alpha = hn::Set(d, p.alpha), beta = hn::Set(d, p.beta);
  HWY_UNROLL(8)
  for (size_t v = 0; v < V; ++v) {
    const int64_t column = j + static_cast<int64_t>(v) * lanes;
    const auto load = [&](const T* at) { return partial(v) ? hn::MaskedLoad(mask, d, at) : hn::LoadU(d, at); };
    const Vec bias = p.bias == nullptr ? hn::Zero(d) : p.bias_is_scalar ? hn::Set(d, *p.bias) : load(p.bias + column);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) {
      T* at = p.c + (i + static_cast<int64_t>(r)) * p.c_row + column;
      Vec x = hn::MulAdd(alpha, sum[r][v], bias);
      if (p.beta != 0) x = hn::MulAdd(beta, load(at), x);
      if (p.relu) x = hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x);  // NaN stays
      if (partial(v)) {
        hn::BlendedStore(x, mask, d, at);
      } else {
        hn::StoreU(x, d, at);
      }
    }
  }
}

// The same for all rows.
template <size_t V, bool kPartial, class D, class T = hn::TFromD<D>>
HWY_INLINE void panel(D d, const SmallProduct<T>& p, int64_t j, int64_t last) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kMaxRows) <= p.m; i += kMaxRows) tile<kMaxRows, V, kPartial>(d, p, i, j, last);
  if constexpr (kMaxRows > 4) {
    if (i + 4 <= p.m) tile<4, V, kPartial>(d, p, i, j, last), i += 4;
  }
  if (i + 2 <= p.m) tile<2, V, kPartial>(d, p, i, j, last), i += 2;
  if (i < p.m) tile<1, V, kPartial>(d, p, i, j, last);
}

template <class T>
HWY_INLINE void tiles(const SmallProduct<T>& p) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  if (p.m == 1) {
    // A row has no second row to fill the pipeline with, so it takes more columns at once.
    for (; j + 8 * lanes <= p.n; j += 8 * lanes) tile<1, 8, false>(d, p, 0, j, lanes);
  }
  for (; j + 2 * lanes <= p.n; j += 2 * lanes) panel<2, false>(d, p, j, lanes);
  if constexpr (kMasks) {
    const int64_t left = p.n - j;
    if (left > lanes) {
      panel<2, true>(d, p, j, left - lanes);
    } else if (left == lanes) {
      panel<1, false>(d, p, j, lanes);
    } else if (left > 0) {
      panel<1, true>(d, p, j, left);
    }
  } else {
    if (j + lanes <= p.n) panel<1, false>(d, p, j, lanes), j += lanes;
    for (; j < p.n; ++j) panel<1, false>(hn::CappedTag<T, 1>(), p, j, 1);
  }
}

// out[k][n] = b[n][k]; both contiguous rows, `columns` n of them. Blocks of 128-bit vectors.
template <class T>
HWY_INLINE void transpose(const T* b, int64_t stride, int64_t columns, int64_t depth, T* out) {
  int64_t j = 0;
  const hn::Full128<T> d;
  constexpr auto kLanes = static_cast<int64_t>(16 / sizeof(T));
  for (; j + kLanes <= columns; j += kLanes) {
    const T* in = b + j * stride;
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      T* to = out + k * columns + j;
      if constexpr (kLanes == 4) {
        const auto r0 = hn::LoadU(d, in + k), r1 = hn::LoadU(d, in + stride + k);
        const auto r2 = hn::LoadU(d, in + 2 * stride + k), r3 = hn::LoadU(d, in + 3 * stride + k);
        const auto low02 = hn::InterleaveLower(d, r0, r2), low13 = hn::InterleaveLower(d, r1, r3);
        const auto high02 = hn::InterleaveUpper(d, r0, r2), high13 = hn::InterleaveUpper(d, r1, r3);
        hn::StoreU(hn::InterleaveLower(d, low02, low13), d, to);
        hn::StoreU(hn::InterleaveUpper(d, low02, low13), d, to + columns);
        hn::StoreU(hn::InterleaveLower(d, high02, high13), d, to + 2 * columns);
        hn::StoreU(hn::InterleaveUpper(d, high02, high13), d, to + 3 * columns);
      } else {
        const auto r0 = hn::LoadU(d, in + k), r1 = hn::LoadU(d, in + stride + k);
        hn::StoreU(hn::InterleaveLower(d, r0, r1), d, to);
        hn::StoreU(hn::InterleaveUpper(d, r0, r1), d, to + columns);
      }
    }
    for (; k < depth; ++k) {
      for (int64_t lane = 0; lane < kLanes; ++lane) out[k * columns + j + lane] = in[lane * stride + k];
    }
  }
  for (; j < columns; ++j) {
    for (int64_t k = 0; k < depth; ++k) out[k * columns + j] = b[j * stride + k];
  }
}

template <class T>
HWY_INLINE void store_dot(const SmallProduct<T>& p, int64_t j, T sum) {
  T* at = p.c + j * p.c_col;
  T x = p.alpha * sum;
  if (p.bias != nullptr) x += p.bias[p.bias_is_scalar ? 0 : j];
  if (p.beta != 0) x += p.beta * *at;
  *at = p.relu && x < T(0) ? T(0) : x;
}

// C columns j .. j + J of one row: dot products of `a`, contiguous, with contiguous columns of B.
template <size_t J, class T>
HWY_INLINE void dots(const SmallProduct<T>& p, const T* a, int64_t j) {
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* b = p.b + j * p.b_col;
  // Two partial sums per column hide the latency of the additions.
  Vec even[J], odd[J];
  HWY_UNROLL(4)
  for (size_t c = 0; c < J; ++c) even[c] = odd[c] = hn::Zero(d);
  int64_t k = 0;
  for (; k + 2 * lanes <= p.k; k += 2 * lanes) {
    const Vec x0 = hn::LoadU(d, a + k), x1 = hn::LoadU(d, a + k + lanes);
    HWY_UNROLL(4)
    for (size_t c = 0; c < J; ++c) {
      const T* column = b + static_cast<int64_t>(c) * p.b_col + k;
      even[c] = hn::MulAdd(x0, hn::LoadU(d, column), even[c]);
      odd[c] = hn::MulAdd(x1, hn::LoadU(d, column + lanes), odd[c]);
    }
  }
  if (k + lanes <= p.k) {
    const Vec x = hn::LoadU(d, a + k);
    HWY_UNROLL(4)
    for (size_t c = 0; c < J; ++c) {
      even[c] = hn::MulAdd(x, hn::LoadU(d, b + static_cast<int64_t>(c) * p.b_col + k), even[c]);
    }
    k += lanes;
  }
  if (kMasks && k < p.k) {
    const auto mask = hn::FirstN(d, static_cast<size_t>(p.k - k));
    const Vec x = hn::MaskedLoad(mask, d, a + k);
    HWY_UNROLL(4)
    for (size_t c = 0; c < J; ++c) {
      odd[c] = hn::MulAdd(x, hn::MaskedLoad(mask, d, b + static_cast<int64_t>(c) * p.b_col + k), odd[c]);
    }
    k = p.k;
  }
  HWY_UNROLL(4)
  for (size_t c = 0; c < J; ++c) {
    T sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(even[c], odd[c])));
    for (int64_t rest = k; rest < p.k; ++rest) sum += a[rest] * b[static_cast<int64_t>(c) * p.b_col + rest];
    store_dot(p, j + static_cast<int64_t>(c), sum);
  }
}

template <class T>
HWY_INLINE void run(SmallProduct<T> p) {
  alignas(64) T packed[kMaxPacked];
  if (p.by_dots) {
    const T* a = p.a;
    if (p.a_col != 1) {
      for (int64_t k = 0; k < p.k; ++k) packed[k] = p.a[k * p.a_col];
      a = packed;
    }
    int64_t j = 0;
    for (; j + 4 <= p.n; j += 4) dots<4>(p, a, j);
    for (; j < p.n; ++j) dots<1>(p, a, j);
    return;
  }
  if (p.b_col != 1) {
    transpose(p.b, p.b_col, p.n, p.k, packed);
    p.b = packed;
    p.b_row = p.n;
  }
  tiles(p);
}

void run_f32(const SmallProduct<float>& p) { run(p); }
void run_f64(const SmallProduct<double>& p) { run(p); }

}  // namespace HWY_NAMESPACE
}  // namespace chorale::kernel::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {
namespace {

HWY_EXPORT(run_f32);
HWY_EXPORT(run_f64);

// Multiplications up to which this code beats the libraries on one core (Zen 4, microseconds, here against there):
// f32 64 x 64 x 64 4.7 against 5.3, with B transposed 5.1 against 6.9; f64 256 x 256 x 256 594 against 662.
template <class T>
constexpr int64_t kMaxSmall = sizeof(T) == 4 ? 64 * 64 * 64 : 256 * 256 * 256;
// Multiplications that pay for waking up a thread.
constexpr int64_t kGrain = 1 << 19;

void run(const SmallProduct<float>& p) { HWY_DYNAMIC_DISPATCH(run_f32)(p); }
void run(const SmallProduct<double>& p) { HWY_DYNAMIC_DISPATCH(run_f64)(p); }

template <class T>
bool small_product_of(const Product& p) {
  SmallProduct<T> s{.m = p.m,
                    .n = p.n,
                    .k = p.k,
                    .a = static_cast<const T*>(p.a),
                    .a_row = p.a_row,
                    .a_col = p.a_col,
                    .b = static_cast<const T*>(p.b),
                    .b_row = p.b_row,
                    .b_col = p.b_col,
                    .c = static_cast<T*>(p.c),
                    .c_row = p.c_row,
                    .c_col = p.c_col,
                    .bias = static_cast<const T*>(p.bias),
                    .bias_is_scalar = false,
                    .alpha = static_cast<T>(p.alpha),
                    .beta = static_cast<T>(p.beta),
                    .relu = p.epilogue == Epilogue::kRelu,
                    .by_dots = false};
  int64_t a_batch = p.a_batch, b_batch = p.b_batch;
  // The transposed problem: wanted when C has contiguous columns, or is one column.
  if ((s.n == 1 && s.m > 1) || (s.c_col != 1 && s.c_row == 1 && s.m > 1)) {
    if (s.bias != nullptr && s.n > 1) return false;
    s.bias_is_scalar = true;
    std::swap(s.m, s.n);
    std::swap(s.a, s.b);
    std::swap(a_batch, b_batch);
    std::swap(s.a_row, s.b_col);
    std::swap(s.a_col, s.b_row);
    std::swap(s.c_row, s.c_col);
  }
  // The stride of a dimension of size 1 means nothing: make it the one that is wanted.
  if (s.k == 1) s.b_row = 1;
  if (s.n == 1) s.b_col = s.b_row == 1 ? s.k : 1, s.c_col = 1;
  s.by_dots = s.m == 1 && s.b_row == 1 && s.b_col != 1;
  if (s.by_dots) {
    if (s.a_col != 1 && s.k > kMaxPacked) return false;
  } else {
    if (s.c_col != 1) return false;
    if (s.b_col != 1 && (s.b_row != 1 || s.k * s.n > kMaxPacked)) return false;
  }
  const bool vector = s.by_dots || (s.m == 1 && sizeof(T) == 8);
  const int64_t depth_rows = s.m * s.k;
  if (!vector && (depth_rows > kMaxSmall<T> || s.n > kMaxSmall<T> / depth_rows)) return false;
  // Cut along the longer side; each element is summed in the same order however it is cut.
  const auto share_out = [](const SmallProduct<T>& one) {
    const bool by_rows = one.m > one.n;
    parallel_for(by_rows ? one.m : one.n, std::max<int64_t>(1, kGrain / (one.k * (by_rows ? one.n : one.m))),
                 [&](int64_t begin, int64_t end) {
                   SmallProduct<T> part = one;
                   (by_rows ? part.m : part.n) = end - begin;
                   if (by_rows) {
                     part.a += begin * one.a_row;
                     part.c += begin * one.c_row;
                   } else {
                     part.b += begin * one.b_col;
                     part.c += begin * one.c_col;
                     if (part.bias != nullptr && !part.bias_is_scalar) part.bias += begin;
                   }
                   run(part);
                 });
  };
  if (p.batch == 1) {
    share_out(s);
    return true;
  }
  const auto range = [&](int64_t begin, int64_t end) {
    SmallProduct<T> one = s;
    for (int64_t i = begin; i < end; ++i) {
      one.a = s.a + i * a_batch;
      one.b = s.b + i * b_batch;
      one.c = s.c + i * p.c_batch;
      share_out(one);  // does nothing more inside a parallel region
    }
  };
  if (p.batch < thread_count()) {
    range(0, p.batch);
  } else {
    parallel_for(p.batch, std::max<int64_t>(1, kGrain / (depth_rows * s.n)), range);
  }
  return true;
}

}  // namespace

bool small_product(const Product& p) {
  if (p.epilogue != Epilogue::kNone && p.epilogue != Epilogue::kRelu) return false;
  if (p.dtype == DType::kF32) return small_product_of<float>(p);
  if (p.dtype == DType::kF64) return small_product_of<double>(p);
  return false;
}

}  // namespace chorale::kernel::cpu
#endif
