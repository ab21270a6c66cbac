// What kernels over f32, f64, f16 and bf16 share that compute in f32 or f64.
#pragma once

#include <type_traits>

#include "chorale/base/dtype.h"
#include "chorale/base/error.h"
#include "chorale/kernel/cpu/support/scratch.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {

// The type in which elements stored as S are computed with.
template <class S>
using Compute = std::conditional_t<std::is_same_v<S, double>, double, float>;

// Calls f(TypeTag<S>{}) for a floating dtype.
template <class F>
void visit_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(base::TypeTag<float>{});
    case DType::kF64:
      return f(base::TypeTag<double>{});
    case DType::kF16:
      return f(base::TypeTag<float16>{});
    case DType::kBF16:
      return f(base::TypeTag<bfloat16>{});
    default:
      CHORALE_INVARIANT(false, "no floating dtype: ", dtype);
  }
}

// A place for up to n elements of a row as numbers to compute with. Rows of f32 and f64 are used where they are.
template <class S>
class Row {
 public:
  using C = Compute<S>;
  static constexpr bool kConverts = !std::is_same_v<S, C>;

  explicit Row(int64_t n) : buffer_(kConverts ? static_cast<size_t>(n) * sizeof(C) : 0) {}

  // The elements to read.
  const C* load(const S* row, int64_t n) const {
    if constexpr (kConverts) {
      vec::convert_loop(dtype_of<S>, dtype_of<C>)(row, buffer_.as<C>(), n);
      return buffer_.as<C>();
    } else {
      return row;
    }
  }
  // Where to write; then store.
  C* target(S* row) const {
    if constexpr (kConverts) {
      return buffer_.as<C>();
    } else {
      return row;
    }
  }
  void store(S* row, int64_t n) const {
    if constexpr (kConverts) vec::convert_loop(dtype_of<C>, dtype_of<S>)(buffer_.as<C>(), row, n);
  }

 private:
  Scratch buffer_;
};

// How many rows make a piece of work that is worth a thread.
inline int64_t row_grain(int64_t row_elems) {
  constexpr int64_t kElems = 16 * 1024;
  return row_elems >= kElems ? 1 : kElems / (row_elems > 0 ? row_elems : 1);
}

}  // namespace chorale::kernel::cpu
