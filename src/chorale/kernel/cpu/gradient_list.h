// Passes over lists of gradients: norms, clipping, and taking the scale of a loss out again.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// Gives for each tensor the sum of |x|^p in f64, or the largest |x| where p is infinite; PowerAttrs
void power_sums(const KernelArgs& args);
// norm, then the list: scaled by max_norm / (norm + 1e-6) where that is below 1; ClipNormAttrs
void clip_by_norm(const KernelArgs& args);
// Elements limited to [-limit, limit]; ClipValueAttrs
void clip_by_value(const KernelArgs& args);
// scale, found_inf, then the list: divided by the scale, and found_inf is 1 where an element was infinite or NaN.
void unscale(const KernelArgs& args);
// scale, steps since it changed, found_inf: the first two as they are after a step; LossScaleAttrs
void next_loss_scale(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
