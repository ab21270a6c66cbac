// The models of `chorale train`, fully sharded: each block is a group, and what is left is the outermost one's.
#pragma once

#include "chorale/train/full_sharding.h"

namespace chorale::app {

std::unique_ptr<train::FullSharding> shard_fully(nn::Module& model, const train::JobRanks& ranks,
                                                 const train::TrainOptions& options, Device device);

}  // namespace chorale::app
