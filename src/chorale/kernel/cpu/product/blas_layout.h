// Strided matrices as BLAS wants them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace chorale::kernel::cpu {

// How a rows x cols matrix is handed to a row-major BLAS: leading dimension, and whether it is stored transposed.
struct BlasLayout {
  bool fits = false;
  bool transposed = false;
  int64_t ld = 1;
};

// The strides of a dimension of size 1 mean nothing. Rows that overlap or coincide (stride less than their length) do
// not fit.
inline BlasLayout blas_layout(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  const auto fits = [](int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride) {
    return (inner == 1 || inner_stride == 1) && (outer == 1 || outer_stride >= inner);
  };
  if (fits(rows, cols, row_stride, col_stride)) return {true, false, rows == 1 ? cols : row_stride};
  if (fits(cols, rows, col_stride, row_stride)) return {true, true, cols == 1 ? rows : col_stride};
  return {};
}

// out, contiguous rows, = in.
template <class T>
void pack(const T* in, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, T* out) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[i * cols + j] = in[i * row_stride + j * col_stride];
  }
}
template <class T>
void unpack(const T* in, int64_t rows, int64_t cols, T* out, int64_t row_stride, int64_t col_stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[i * row_stride + j * col_stride] = in[i * cols + j];
  }
}

}  // namespace chorale::kernel::cpu
