// A group of ranks as an operand of collectives.
#pragma once

#include <memory>

#include "chorale/comm/group.h"
#include "chorale/tensor/tensor.h"

namespace chorale {

// A group as an operand: a tiny tensor that stands for it, so that what was recorded holds on to the group, and a graph
// can be given another one. i64 [2], rank and size; plain numbers {0, 1} are a group of one.
Tensor group_tensor(std::shared_ptr<const comm::Group> group);
// The same of a group that outlives all uses of the tensor, gradients included.
Tensor group_tensor(const comm::Group& group);
// The group of such a tensor; null where it stands for one rank alone.
const comm::Group* group_of(const Tensor& tensor);

// Whether a tensor stands for a group in this way.
bool is_group(const Tensor& tensor);

}  // namespace chorale
