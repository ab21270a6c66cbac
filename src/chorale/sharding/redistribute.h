// Moving parts between placements, one dimension of the mesh at a time.
#pragma once

#include <vector>

#include "chorale/sharding/layout.h"
#include "chorale/tensor/tensor.h"

namespace chorale::sharding {

// One dimension of the mesh changes its placement.
struct Step {
  size_t mesh_dim;
  Placement from, to;
};
// Note [Planner] What is nested must be taken apart from the inside: a dimension of the tensor that several dimensions
// of the mesh split is cut by the first of them first. Therefore mesh dimensions are first walked from the last to the
// first, and a target shard whose outer cuts are not yet those of the target becomes a copy on the way; then from the
// first to the last, for what is left.
std::vector<Step> plan(const Placements& from, const Placements& to);

// The part of this rank, moved. `whole`: the shape of the whole tensor. Nothing is recorded. Shares memory with `local`
// where nothing has to move. InvalidArgument for what cannot be: from a shard to partial values, between their kinds.
// `async`: the last collective may still be under way.
Tensor move_part(const Tensor& local, const Shape& whole, const Mesh& mesh, const Placements& from,
                 const Placements& to, bool async = false);

// The ranks of a line along a dimension of a mesh, as the model of costs knows them: the same on every rank.
struct Line {
  int64_t ranks = 1;
  bool spans_hosts = false;
};
// What a step costs, in microseconds of a model that is the same on every rank (costs.h): bytes of the
// tensor as far as this group has them together. Infinite where it cannot be done.
double cost_of(const Placement& from, const Placement& to, const Line& line, double bytes);

}  // namespace chorale::sharding
