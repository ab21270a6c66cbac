// Losses: fused, so that no intermediate of the size of the input is written. A class is a dimension of the input: 1,
// or 0 of a vector. Targets are classes; one out of range that is not ignore_index is an InvalidArgument, before
// anything is written.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// x, target, weight? -> loss, logsumexp; CrossEntropyAttrs
void cross_entropy(const KernelArgs& args);
// dloss, x, target, weight?, logsumexp -> dx
void cross_entropy_backward(const KernelArgs& args);

// Negative log likelihood. x, target, weight? -> loss; NllLossAttrs
void nll_loss(const KernelArgs& args);
// dloss, target, weight? -> dx; NllLossBackwardAttrs
void nll_loss_backward(const KernelArgs& args);

// x, y -> loss; DifferenceLossAttrs
void difference_loss(const KernelArgs& args);
// dloss, x, y -> dx
void difference_loss_backward(const KernelArgs& args);

// x, target -> -(target * log(x) + (1 - target) * log(1 - x)), the logarithms being at least -100
void binary_cross_entropy(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
