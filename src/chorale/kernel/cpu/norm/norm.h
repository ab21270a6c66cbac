// Normalisations. Statistics are in f32 for f16 and bf16; weight and bias may have another floating dtype than x.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// x, weight?, bias? -> y, mean, rstd; x is rows x n, normalised along n.
void layer_norm(const KernelArgs& args);
// dy, x, mean, rstd, weight? -> dx, dweight, dbias
void layer_norm_backward(const KernelArgs& args);

// The same without subtracting a mean. x, weight? -> y, rstd
void rms_norm(const KernelArgs& args);
// dy, x, rstd, weight? -> dx, dweight
void rms_norm_backward(const KernelArgs& args);

// x [N, C, …], weight? [C], bias? [C] -> y, mean [N, groups], rstd [N, groups]
void group_norm(const KernelArgs& args);
// dy, x, mean, rstd, weight? -> dx, dweight, dbias
void group_norm_backward(const KernelArgs& args);

// x [N, C, …], weight? [C], bias? [C] -> y, mean [C], variance [C] (of the population). y has x's layout: row-major or
// channels last.
void batch_norm(const KernelArgs& args);
// dy, x, mean, variance, weight? -> dx, dweight, dbias
void batch_norm_backward(const KernelArgs& args);

// The last step of batch_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias per channel. y is without gaps,
// row-major or channels last.
struct StandardChannels {
  Tensor x, mean, variance, weight, bias;  // the last two may be undefined
};
void standardize_channels(const StandardChannels& of, double eps, const Tensor& y);

// running, now -> (1 - momentum) * running + momentum * scale * now; vectors, in place or not.
void running_average(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
