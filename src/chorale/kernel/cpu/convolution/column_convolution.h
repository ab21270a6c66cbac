// Convolutions as matrix products: windows of x become columns of a matrix. They serve dtypes and shapes that oneDNN
// does not have.
#pragma once

#include "chorale/kernel/cpu/convolution/convolution_engine.h"

namespace chorale::kernel::cpu {

// f32 and f64; the contracts of convolution_engine.h. Nothing is empty. Bias is left to the caller.
void column_forward(const Convolution& c, const void* x, const void* w, void* y);
void column_backward_data(const Convolution& c, const void* dy, const void* w, void* dx);
void column_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw);

}  // namespace chorale::kernel::cpu
