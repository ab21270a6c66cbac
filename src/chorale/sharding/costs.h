// The constants by which ways of running an op on parts are compared.
#pragma once

#include "chorale/comm/mesh.h"

namespace chorale {

namespace sharding {

// What redistributions cost, in microseconds. The defaults are the catalogue's (spec/tensor-parallel.md, A5).
struct CostModel {
  double start = 6.6;  // of a call
  double hop = 0.6, hop_between_hosts = 2.7;
  double bytes_per_us = 87.7e3;
  double share_between_hosts = 0.22;  // of that speed
};
// The model that this process decides by. What was decided by another one is decided again.
const CostModel& cost_model();
// Every rank must have the same: ranks that decide differently wait for each other in vain.
void set_cost_model(const CostModel& model);
// What calls of a mesh take along each of its dimensions, as its first rank has found. All ranks of the mesh call it.
CostModel measured_costs(const comm::Mesh& mesh);

}  // namespace sharding

// Ops on sharded tensors are from now on decided by what calls of this mesh take, instead of by fixed constants:
// measured along each of its dimensions, and taken from its first rank by all. All ranks of the mesh call it, with no
// call of theirs under way.
void use_measured_costs(const comm::Mesh& mesh);

}  // namespace chorale
