// Attention on a GPU: by flash.h where that knows the call, else by products and a softmax.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void attention(const KernelArgs& args);
void attention_backward(const KernelArgs& args);
void attention_backward_joined(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
