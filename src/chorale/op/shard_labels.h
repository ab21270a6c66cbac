// Sharding rules as text: reading them, and checking them against an op's operands.
#pragma once

#include <string>
#include <vector>

#include "chorale/op/label_letters.h"
#include "chorale/op/op_def.h"

namespace chorale::op {

// "mk,kn->mn" taken apart: one string of letters per operand and per result, one letter per dimension. "..." is spelled
// out with the letters of kSpareLetters.
struct ShardLabels {
  std::vector<std::string> in;
  std::vector<std::string> out;
};

// The rule for operands and results of these ranks (-1: an absent operand, which gets no letters). Throws
// InvalidArgument when the rule does not fit them. Not for replicate-only rules.
ShardLabels shard_labels(const OpDef& op, const Attrs& attrs, std::span<const int64_t> in_dims,
                         std::span<const int64_t> out_dims);

}  // namespace chorale::op
