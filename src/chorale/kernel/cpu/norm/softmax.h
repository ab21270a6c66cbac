// softmax and log_softmax along one dimension, and their gradients from their results.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void softmax(const KernelArgs& args);               // x -> y; DimAttrs
void log_softmax(const KernelArgs& args);           // x -> y
void softmax_backward(const KernelArgs& args);      // dy, y -> dx
void log_softmax_backward(const KernelArgs& args);  // dy, y -> dx

}  // namespace chorale::kernel::cpu
