#include "chorale/kernel/cpu/product/integer_product.h"

#include <algorithm>
#include <type_traits>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/product/blas_layout.h"
#include "chorale/kernel/cpu/support/scratch.h"

namespace chorale::kernel::cpu {
namespace {

// Rows of C, cut so that a piece's sums stay in the first-level cache while all rows of B's piece pass by.
constexpr int64_t kColumns = 512;
constexpr int64_t kIntegerGrain = 1 << 16;

template <class T>
void rows(const Product& p, const T* a, const T* b, T* c, int64_t begin, int64_t end) {
  // Unsigned arithmetic wraps; sums of the narrow types wrap in 32 bits and are cut at the end, with the same result.
  using Sum = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const auto alpha = static_cast<Sum>(static_cast<int64_t>(p.alpha)),
             beta = static_cast<Sum>(static_cast<int64_t>(p.beta));
  Sum sums[kColumns];
  for (int64_t from = 0; from < p.n; from += kColumns) {
    const int64_t columns = std::min(kColumns, p.n - from);
    for (int64_t i = begin; i < end; ++i) {
      std::fill_n(sums, columns, Sum{0});
      for (int64_t k = 0; k < p.k; ++k) {
        const auto x = static_cast<Sum>(a[i * p.a_row + k * p.a_col]);
        const T* row = b + k * p.n + from;
        for (int64_t j = 0; j < columns; ++j) sums[j] += x * static_cast<Sum>(row[j]);
      }
      T* out = c + i * p.c_row + from * p.c_col;
      for (int64_t j = 0; j < columns; ++j) {
        T& to = out[j * p.c_col];
        to = static_cast<T>(alpha * sums[j] + (beta == 0 ? 0 : beta * static_cast<Sum>(to)));
      }
    }
  }
}

template <class T>
void run(const Product& p) {
  const bool contiguous = p.b_col == 1 && p.b_row == p.n;
  const Scratch space(contiguous ? 0 : static_cast<size_t>(p.k * p.n) * sizeof(T));
  for (int64_t i = 0; i < p.batch; ++i) {
    const T* b = static_cast<const T*>(p.b) + i * p.b_batch;
    if (!contiguous) {
      if (i == 0 || p.b_batch != 0) pack(b, p.k, p.n, p.b_row, p.b_col, space.as<T>());
      b = space.as<T>();
    }
    parallel_for(p.m, std::max<int64_t>(1, kIntegerGrain / (p.n * p.k)), [&](int64_t begin, int64_t end) {
      rows(p, static_cast<const T*>(p.a) + i * p.a_batch, b, static_cast<T*>(p.c) + i * p.c_batch, begin, end);
    });
  }
}

}  // namespace

void integer_product(const Product& p) {
  visit_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      run<T>(p);
    } else {
      CHORALE_INVARIANT(false, p.dtype, " is no integer");
    }
  });
}

}  // namespace chorale::kernel::cpu
