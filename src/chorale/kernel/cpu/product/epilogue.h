// The last pass over a result: bias and activation.
#pragma once

#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::kernel::cpu {

// C = epilogue(C + bias) for one m x n matrix; f32 or f64. bias, n contiguous values, may be null.
void finish(DType dtype, void* c, int64_t m, int64_t n, int64_t c_row, int64_t c_col, const void* bias,
            Epilogue epilogue);

}  // namespace chorale::kernel::cpu
