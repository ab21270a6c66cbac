// The f32 product that needs no primitive: no cost for a new shape.
#pragma once

#include <cstdint>

namespace chorale::kernel::cpu::dnnl {

// C = alpha * op(A) op(B) + beta * C, row-major, op transposes where told so; leading dimensions at least the row's
// length.
void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

}  // namespace chorale::kernel::cpu::dnnl
