// Results of functions that have memory of what the function was given.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::autograd {

// Of what a Function has just given, with its history: `result` has memory of `input`. To overwrite it in place where
// that is recorded is an error, since the input would change without a history; so is using it after the input was
// overwritten. No op could be replayed, as it is for a view (Note [Views] in node.h).
void mark_shared(const Tensor& result, const Tensor& input);

}  // namespace chorale::autograd
