#pragma once

#include <cstdint>

namespace chorale::kernel::cpu {

// y = x * scale, or 0 where the word is below the threshold.
void drop_row(const float* x, const uint32_t* words, uint32_t threshold, float scale, float* y, int64_t n);
void drop_row(const double* x, const uint32_t* words, uint32_t threshold, double scale, double* y, int64_t n);

}  // namespace chorale::kernel::cpu
