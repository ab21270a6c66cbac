// Inputs for the samples of op rows: fixed numbers from a formula, the same on every machine.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale::op {

// f64 values in [low, high), no two equal in practice, in no obvious order; another seed gives other values.
Tensor sample(const Shape& sizes, int seed = 0, double low = -2, double high = 2);
// i64 values in [low, high).
Tensor sample_ints(const Shape& sizes, int64_t low, int64_t high, int seed = 0);
Tensor sample_bools(const Shape& sizes, int seed = 0);
Tensor sample_complex(const Shape& sizes, int seed = 0);  // c128
// A stretch of random words (kernel/stretch.h).
Tensor sample_stretch(int64_t seed, int64_t offset = 0);

}  // namespace chorale::op
