// Softmax, normalisation and losses over lines, on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void softmax(const KernelArgs& args);
void log_softmax(const KernelArgs& args);
void softmax_backward(const KernelArgs& args);
void log_softmax_backward(const KernelArgs& args);
void layer_norm(const KernelArgs& args);
void layer_norm_backward(const KernelArgs& args);
void add_layer_norm(const KernelArgs& args);
void add_layer_norm_backward(const KernelArgs& args);
void add_layer_norm_backward_summed(const KernelArgs& args);
void rms_norm(const KernelArgs& args);
void rms_norm_backward(const KernelArgs& args);
void cross_entropy(const KernelArgs& args);
void cross_entropy_backward(const KernelArgs& args);
void cross_entropy_with_slopes(const KernelArgs& args);
void nll_loss(const KernelArgs& args);
void nll_loss_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
