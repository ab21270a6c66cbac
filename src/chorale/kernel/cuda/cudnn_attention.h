// Attention by cuDNN's fused graphs: f16 and bf16, no mask, no dropout. The backward pass adds up the gradient of the
// queries in the order in which its blocks finish: it does not repeat its bits. Where the same bits are asked for
// (base/same_bits.h), flash.cu is used, which repeats them.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// False, with nothing done, where it is not for this call.
bool cudnn_attention(const KernelArgs& args);
bool cudnn_attention_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
