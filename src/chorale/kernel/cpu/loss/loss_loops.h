// Vector loops of losses, on contiguous f32 and f64: one thread, run-time dispatch.
#pragma once

#include <cstdint>

#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {

// out = f(x - y) with the f of `kind`
void difference_row(Difference kind, float bound, const float* x, const float* y, float* out, int64_t n);
void difference_row(Difference kind, double bound, const double* x, const double* y, double* out, int64_t n);
// sum f(x - y); for rows of a few thousand elements, beyond which a caller adds up such sums
float difference_sum(Difference kind, float bound, const float* x, const float* y, int64_t n);
double difference_sum(Difference kind, double bound, const double* x, const double* y, int64_t n);
// out = scale * f'(x - y)
void difference_gradient(Difference kind, float bound, float scale, const float* x, const float* y, float* out,
                         int64_t n);
void difference_gradient(Difference kind, double bound, double scale, const double* x, const double* y, double* out,
                         int64_t n);

// out = -(t * log(x) + (1 - t) * log(1 - x)), the logarithms being at least -100
void binary_cross_entropy_row(const float* x, const float* t, float* out, int64_t n);
void binary_cross_entropy_row(const double* x, const double* t, double* out, int64_t n);

}  // namespace chorale::kernel::cpu
