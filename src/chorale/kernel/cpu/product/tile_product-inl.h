// Products of small matrices that lie in the caches, for kernels that multiply as they go. C is cut into tiles of rows
// and vectors of columns that stay in registers while k runs: each step loads vectors of B and broadcasts elements of
// A. So A may have any strides, while rows of B and C are contiguous and padded to whole vectors. Read once per target.
#if defined(CHORALE_KERNEL_CPU_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_KERNEL_CPU_TILE_PRODUCT_INL_H_
#undef CHORALE_KERNEL_CPU_TILE_PRODUCT_INL_H_
#else
#define CHORALE_KERNEL_CPU_TILE_PRODUCT_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The tile's accumulators, a row of B and one broadcast element fit the registers: 32 with AVX-512, else 16.
constexpr size_t kTileRows = 6;
constexpr size_t kTileVecs = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

// What C starts from.
enum class Start { kZero, kAdd, kScaleAdd };  // kScaleAdd: C times a factor per row

template <class T>
struct TileProduct {
  int64_t m, n, k;  // n: a multiple of the number of lanes
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t b_row;
  T* c;
  int64_t c_row;
  const T* row_scale = nullptr;  // m factors
};

template <Start kStart, size_t R, size_t V, class T>
HWY_INLINE void tile(const TileProduct<T>& p, int64_t i, int64_t j) {
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  T* c = p.c + i * p.c_row + j;
  Vec sum[R][V];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < V; ++v) {
      const T* at = c + static_cast<int64_t>(r) * p.c_row + static_cast<int64_t>(v) * lanes;
      sum[r][v] = kStart == Start::kZero ? hn::Zero(d) : hn::LoadU(d, at);
      if constexpr (kStart == Start::kScaleAdd) {
        sum[r][v] = hn::Mul(sum[r][v], hn::Set(d, p.row_scale[i + static_cast<int64_t>(r)]));
      }
    }
  }
  const T* a = p.a + i * p.a_row;
  const T* b = p.b + j;
  for (int64_t k = 0; k < p.k; ++k, a += p.a_col, b += p.b_row) {
    Vec row[V];
    HWY_UNROLL(8)
    for (size_t v = 0; v < V; ++v) row[v] = hn::LoadU(d, b + static_cast<int64_t>(v) * lanes);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) {
      const Vec x = hn::Set(d, a[static_cast<int64_t>(r) * p.a_row]);
      HWY_UNROLL(8)
      for (size_t v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(x, row[v], sum[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < V; ++v) {
      hn::StoreU(sum[r][v], d, c + static_cast<int64_t>(r) * p.c_row + static_cast<int64_t>(v) * lanes);
    }
  }
}

template <Start kStart, size_t V, class T>
HWY_NOINLINE void panel(const TileProduct<T>& p, int64_t j) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kTileRows) <= p.m; i += kTileRows) tile<kStart, kTileRows, V>(p, i, j);
  if (i + 4 <= p.m) tile<kStart, 4, V>(p, i, j), i += 4;
  if (i + 2 <= p.m) tile<kStart, 2, V>(p, i, j), i += 2;
  if (i < p.m) tile<kStart, 1, V>(p, i, j);
}

// C = start + A B.
template <Start kStart, class T>
HWY_INLINE void tile_product(const TileProduct<T>& p) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  const int64_t wide = lanes * static_cast<int64_t>(kTileVecs);
  int64_t j = 0;
  for (; j + wide <= p.n; j += wide) panel<kStart, kTileVecs>(p, j);
  if constexpr (kTileVecs > 2) {
    if (j + 2 * lanes <= p.n) panel<kStart, 2>(p, j), j += 2 * lanes;
  }
  if (j < p.n) panel<kStart, 1>(p, j);
}

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
