// Loops over elements with bodies of generated text (kernel/element_loop.h), compiled by NVRTC.
#pragma once

#include "chorale/kernel/element_loop.h"

namespace chorale::kernel::cuda {

ElementLoops& element_loops();

}  // namespace chorale::kernel::cuda
