// How a call on sharded tensors is run: which placements its operands must have, and which its results then have.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chorale/op/op_def.h"
#include "chorale/sharding/layout.h"

namespace chorale::sharding {

// A function of op, attributes, dtypes, whole shapes and placements: the same on every rank.
struct Decision {
  std::shared_ptr<const Layout> mesh;              // any layout over the mesh
  std::vector<Placements> in;                      // what each operand must be; empty where it is absent
  std::vector<bool> moves;                         // whether it has to be redistributed for that
  std::vector<std::shared_ptr<const Layout>> out;  // of the results
  std::vector<op::OutSpec> specs;                  // of the results, as a whole
  Attrs attrs;                                     // for this rank's part
  std::vector<int64_t> stretch;                    // what a stretch of random numbers goes on with here
  double cost = 0;                                 // of redistributing, in the model's microseconds
};

// `out`: tensors that the results are written into, or none. Throws InvalidArgument where those would have to be
// redistributed.
Decision decide(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, size_t outputs,
                std::span<const Tensor> out);

}  // namespace chorale::sharding
