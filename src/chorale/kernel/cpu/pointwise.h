// The pointwise kernel: one for all operations, layouts and dtypes.
#pragma once

#include "chorale/kernel/pointwise.h"

namespace chorale::kernel::cpu {

// Inputs are broadcast to the output and converted to the dtype of the loop, results to the output's, chunk by chunk.
// An output may be exactly one of the inputs. An integer divided by zero is an InvalidArgument; nothing is written
// then.
void run_pointwise(const Pointwise& pointwise, const KernelArgs& args);

template <vec::ScalarOp op, Promotion promotion>
void pointwise(const KernelArgs& args) {
  run_pointwise({op, promotion}, args);
}

}  // namespace chorale::kernel::cpu
