// Dropout from a counter-based stream: word i of it decides about element i.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// An element is dropped where its random word is below this; exact to 2^-32.
uint32_t dropout_threshold(double p);

// x -> x / (1 - p), or 0 where dropped; DropoutAttrs
void dropout(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
