// Selective activation checkpointing, and what a compiler wants to know of checkpointed calls. The plain form is in
// function.h.
#pragma once

#include <cstdint>

#include "chorale/autograd/function.h"
#include "chorale/op/op_def.h"

namespace chorale {

// Asked for every op that a checkpointed call runs: whether its results are kept, and not computed again.
using CheckpointPolicy = std::function<bool(const op::OpDef& op)>;

// Like checkpoint(function, in), but results of ops that the policy names are kept: they are there when the function is
// run again, and are not computed a second time. Views and writes in place are always done again; a kept result that
// was overwritten is an error.
std::vector<Tensor> checkpoint(std::function<std::vector<Tensor>(const std::vector<Tensor>&)> function,
                               const std::vector<Tensor>& in, CheckpointPolicy keeps);

namespace autograd {
// Which checkpointed call this thread runs for the first time, the outermost one: a number that no other has; 0: none.
uint64_t checkpointed_call();
}  // namespace autograd

}  // namespace chorale
