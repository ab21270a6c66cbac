// The last pass over a result: bias and activation.
#pragma once

#include "chorale/kernel/cpu/product.h"

namespace chorale::kernel::cpu {

// x[i] = epilogue(x[i] + bias[i]) for a contiguous row; bias may be null.
void finish_row(float* x, const float* bias, Epilogue epilogue, int64_t n);
void finish_row(double* x, const double* bias, Epilogue epilogue, int64_t n);

}  // namespace chorale::kernel::cpu
