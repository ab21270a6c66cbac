#include "chorale/kernel/cpu/product/half_row_product.h"

#include <algorithm>
#include <bit>

#include "chorale/vec/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/product/half_row_product.cc"
#include <hwy/foreach_target.h>  // compiles the part below once per instruction set

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using Floats = hn::Vec<D>;

// Highway's names for our types.
struct BFloat {
  using Lane = hwy::bfloat16_t;
  using Scalar = bfloat16;
};
struct Half {
  using Lane = hwy::float16_t;
  using Scalar = float16;
};

template <class H>
HWY_INLINE Floats load(const uint16_t* from) {
  const hn::Rebind<typename H::Lane, D> d;
  return hn::PromoteTo(D(), hn::LoadU(d, reinterpret_cast<const typename H::Lane*>(from)));
}
template <class H>
HWY_INLINE float load_one(const uint16_t* from) {
  return static_cast<float>(std::bit_cast<typename H::Scalar>(*from));
}

// J columns at once, two partial sums each to hide the latency of additions.
template <class H, size_t J>
HWY_INLINE void dots(const float* a, const uint16_t* b, int64_t stride, int64_t k, float* sums) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  Floats even[J], odd[J];
  HWY_UNROLL(4)
  for (size_t j = 0; j < J; ++j) even[j] = odd[j] = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= k; i += 2 * lanes) {
    const Floats x0 = hn::LoadU(d, a + i), x1 = hn::LoadU(d, a + i + lanes);
    HWY_UNROLL(4)
    for (size_t j = 0; j < J; ++j) {
      const uint16_t* column = b + static_cast<int64_t>(j) * stride + i;
      even[j] = hn::MulAdd(x0, load<H>(column), even[j]);
      odd[j] = hn::MulAdd(x1, load<H>(column + lanes), odd[j]);
    }
  }
  HWY_UNROLL(4)
  for (size_t j = 0; j < J; ++j) {
    const uint16_t* column = b + static_cast<int64_t>(j) * stride;
    float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(even[j], odd[j])));
    for (int64_t rest = i; rest < k; ++rest) sum += a[rest] * load_one<H>(column + rest);
    sums[j] = sum;
  }
}

template <class H>
HWY_INLINE void by_columns(const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k, float* sums) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) dots<H, 4>(a, b + j * stride, stride, k, sums + j);
  for (; j < n; ++j) dots<H, 1>(a, b + j * stride, stride, k, sums + j);
}

// sums += R rows of B, scaled: so many streams from memory at once, and the sums are loaded and stored once for all of
// them.
template <class H, size_t R>
HWY_INLINE void add_rows(const float* a, const uint16_t* b, int64_t stride, int64_t n, float* sums) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    Floats sum = hn::LoadU(d, sums + j), other = hn::Zero(d);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) {
      const Floats row = load<H>(b + static_cast<int64_t>(r) * stride + j);
      Floats& to = r % 2 == 0 ? sum : other;
      to = hn::MulAdd(hn::Set(d, a[r]), row, to);
    }
    hn::StoreU(hn::Add(sum, other), d, sums + j);
  }
  for (; j < n; ++j) {
    for (size_t r = 0; r < R; ++r) sums[j] += a[r] * load_one<H>(b + static_cast<int64_t>(r) * stride + j);
  }
}

template <class H>
HWY_INLINE void by_rows(const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k, float* sums) {
  // Sums of this many columns stay in the first-level cache.
  constexpr int64_t kColumns = 2048;
  std::fill_n(sums, n, 0.f);
  for (int64_t from = 0; from < n; from += kColumns) {
    const int64_t columns = std::min(kColumns, n - from);
    int64_t i = 0;
    for (; i + 8 <= k; i += 8) add_rows<H, 8>(a + i, b + i * stride + from, stride, columns, sums + from);
    for (; i < k; ++i) add_rows<H, 1>(a + i, b + i * stride + from, stride, columns, sums + from);
  }
}

void columns_bf16(const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k, float* sums) {
  by_columns<BFloat>(a, b, stride, n, k, sums);
}
void columns_f16(const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k, float* sums) {
  by_columns<Half>(a, b, stride, n, k, sums);
}
void rows_bf16(const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k, float* sums) {
  by_rows<BFloat>(a, b, stride, n, k, sums);
}
void rows_f16(const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k, float* sums) {
  by_rows<Half>(a, b, stride, n, k, sums);
}

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {

HWY_EXPORT(columns_bf16);
HWY_EXPORT(columns_f16);
HWY_EXPORT(rows_bf16);
HWY_EXPORT(rows_f16);

void half_row_by_columns(DType dtype, const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k,
                         float* sums) {
  if (dtype == DType::kBF16) {
    HWY_DYNAMIC_DISPATCH(columns_bf16)(a, b, stride, n, k, sums);
  } else {
    HWY_DYNAMIC_DISPATCH(columns_f16)(a, b, stride, n, k, sums);
  }
}

void half_row_by_rows(DType dtype, const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k,
                      float* sums) {
  if (dtype == DType::kBF16) {
    HWY_DYNAMIC_DISPATCH(rows_bf16)(a, b, stride, n, k, sums);
  } else {
    HWY_DYNAMIC_DISPATCH(rows_f16)(a, b, stride, n, k, sums);
  }
}

}  // namespace chorale::kernel::cpu
#endif
