// Pooling over the last two dimensions of [N, C, H, W], row-major or with the channels last; results have the layout of
// the input.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// x -> y, indices (i64) of the largest elements in H * W; NaN wins, and the first of equal ones.
void max_pool(const KernelArgs& args);           // PoolAttrs
void adaptive_max_pool(const KernelArgs& args);  // AreaAttrs
// dy, indices -> dx; AreaAttrs
void max_pool_backward(const KernelArgs& args);

// x -> y
void avg_pool(const KernelArgs& args);           // AvgPoolAttrs
void adaptive_avg_pool(const KernelArgs& args);  // AreaAttrs
// dy -> dx
void avg_pool_backward(const KernelArgs& args);           // AvgPoolBackwardAttrs
void adaptive_avg_pool_backward(const KernelArgs& args);  // AreaAttrs

}  // namespace chorale::kernel::cpu
