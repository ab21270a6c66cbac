// Several rows as one, for devices that wait for their memory (op/joined.h); on the CPU they run one after the other.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// x, y, weight?, bias? -> x + y, its layer norm in y's dtype, mean, rstd
void add_layer_norm(const KernelArgs& args);
// dsum, dy, x, mean, rstd, weight? -> dx, dx in dy's dtype, dweight, dbias
void add_layer_norm_backward(const KernelArgs& args);
// The same, and the sums of the second result over all dimensions before the normalised ones
void add_layer_norm_backward_summed(const KernelArgs& args);
// What attention_backward takes -> the gradients of q, k and v [B, H, T, D] in one tensor [B, T, 3, H, D]
void attention_backward_joined(const KernelArgs& args);
// dloss?, x, target, weight? -> the loss, logsumexp, and the gradient of x by dloss (absent: ones), which may lie over
// x
void cross_entropy_with_slopes(const KernelArgs& args);
// dy, x -> the gradient of GELU, and its sums over all but the last dimension
void gelu_erf_backward_summed(const KernelArgs& args);
void gelu_tanh_backward_summed(const KernelArgs& args);
// x, other?, weight?, bias? -> relu(batch_norm(x) + other), mean, variance
void batch_norm_relu(const KernelArgs& args);
// dy, x, mean, variance, weight?, bias? -> dx, dweight, dbias, where nothing was added before the ReLU
void batch_norm_relu_backward(const KernelArgs& args);
// dy, other?, y, x, mean, variance, weight? -> what comes of dy + other through the ReLU that gave y, dx, dweight,
// dbias
void relu_batch_norm_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
