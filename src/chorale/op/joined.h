// Rows that do the work of several, with their bits: for devices that wait for their memory, where each value should be
// read and written once. Passes over graphs put them there (graph/passes/join_rows.h); nobody calls them otherwise.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale::op {

extern const OpDef kAddLayerNorm, kAddLayerNormBackward, kAddLayerNormBackwardSummed;
extern const OpDef kAttentionBackwardJoined;
extern const OpDef kCrossEntropyWithSlopes;
extern const OpDef kGeluErfBackwardSummed, kGeluTanhBackwardSummed;
extern const OpDef kBatchNormRelu, kBatchNormReluBackward, kReluBatchNormBackward;
extern const OpDef kToEach;

}  // namespace chorale::op
