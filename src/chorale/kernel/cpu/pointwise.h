// The pointwise kernel: one for all operations, layouts and dtypes.
#pragma once

#include "chorale/kernel/pointwise.h"

namespace chorale::kernel::cpu {

// Inputs are broadcast to the output and converted to the dtype of the loop, results to the output's, chunk by chunk.
// An output may be exactly one of the inputs. An integer divided by zero is an InvalidArgument; nothing is written
// then.
void pointwise(const KernelArgs& args);  // reads args.pointwise

}  // namespace chorale::kernel::cpu
