// Results of functions that have memory of what the function was given.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::autograd {

// Notes that a Function has just returned `result`, with its history, in memory of `input`. Overwriting the result in
// place where that is recorded is an error, since the input would change without a history; so is using it after the
// input was overwritten. For a view an op would be replayed (Note [Views] in node.h); here there is none.
void mark_shared(const Tensor& result, const Tensor& input);

}  // namespace chorale::autograd
