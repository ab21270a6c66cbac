// oneDNN's convolution primitives, with whatever reordering pays off around them.
#pragma once

#include "chorale/kernel/cpu/convolution/convolution_engine.h"

namespace chorale::kernel::cpu::dnnl {

// f32 and bf16. Each returns false, with nothing done, if oneDNN has no such convolution.
bool convolution_forward(const Convolution& c, const void* x, const void* w, const void* bias, void* y);
bool convolution_backward_data(const Convolution& c, const void* dy, const void* w, void* dx);
// dw is not null; dbias may be.
bool convolution_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw, void* dbias);

}  // namespace chorale::kernel::cpu::dnnl
