// Collectives of values (comm/value.h). A value that cannot travel is an InvalidArgument on its rank, before anything
// is sent. All of these block. Ranks outside the group get nothing.
#pragma once

#include "chorale/comm/group.h"
#include "chorale/comm/value.h"

namespace chorale::comm {

std::vector<Value> all_gather_object(const Group& group, const Value& value);
// Empty but on the root.
std::vector<Value> gather_object(const Group& group, const Value& value, int root = 0);
// Replaces the values of all other ranks by the root's; all pass lists of the same length. Bytes of a `device`
// travel through the host, since each rank may name its own.
void broadcast_object_list(const Group& group, std::vector<Value>& values, int root, Device device = kCpu);
// The first of `output` becomes the value that the root has for this rank; the root passes one per rank.
void scatter_object_list(const Group& group, std::vector<Value>& output, const std::vector<Value>& inputs,
                         int root = 0);

}  // namespace chorale::comm
