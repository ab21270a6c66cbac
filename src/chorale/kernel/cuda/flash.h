// Attention without scores in memory (flash.cu): f16 and bf16, no mask, no dropout, depths of up to 128 that are
// multiples of 16.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// False, with nothing done, where it is not for this call.
bool flash_attention(const KernelArgs& args);
bool flash_attention_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
