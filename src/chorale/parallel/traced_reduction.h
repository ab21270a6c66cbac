// Averages the gradients of a data-parallel module inside of a whole graph: starts and waits are nodes of it.
//
// A large gradient is sent as soon as it is there, by itself and where it lies; small ones are put together first. They
// are waited for at the end of backward; passes over the graph move each wait to the update that needs it. Averages
// have the bits of an eager step: what each rank has is multiplied by 1/ranks, and added along the same tree.
#pragma once

#include <vector>

#include "chorale/comm/group.h"
#include "chorale/nn/module.h"

namespace chorale::parallel {

class TracedReduction {
 public:
  // `group` is the operand of its collectives (op/group_tensor.h).
  TracedReduction(const NamedTensors& parameters, Tensor group);
  bool has_begun() const { return has_begun_; }
  // The gradient of parameter i is complete on this rank.
  void mark_ready(size_t i);
  // Gradients are averages from here on.
  void finish();

 private:
  struct Bucket {
    std::vector<size_t> parameters;
    Tensor pending;
  };
  void start(std::vector<size_t> parameters);

  const NamedTensors& parameters_;
  Tensor group_;
  bool has_begun_ = false;
  std::vector<bool> is_ready_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> small_;  // that wait for others
  int64_t small_bytes_ = 0;
};

}  // namespace chorale::parallel
