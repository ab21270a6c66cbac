// A row times a 16-bit matrix: each element of the matrix is read once and converted in a register.
#pragma once

#include <cstdint>

#include "chorale/base/dtype.h"

namespace chorale::kernel::cpu {

// sums[j] = sum over k of a[k] * B[k][j] for j < n; B is f16 or bf16. One thread.
// Columns of B contiguous, `stride` apart:
void half_row_by_columns(DType dtype, const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k,
                         float* sums);
// Rows of B contiguous, `stride` apart:
void half_row_by_rows(DType dtype, const float* a, const uint16_t* b, int64_t stride, int64_t n, int64_t k,
                      float* sums);

}  // namespace chorale::kernel::cpu
