// `chorale train` for programs that have more of the library than `chorale`.
#pragma once

#include "chorale/app/commands.h"
#include "chorale/train/full_sharding.h"

namespace chorale::app {

// As add_train(), which has nothing to shard a model with.
void add_train_with(CLI::App& program, Work& work, const train::ShardFully& shard_fully);

}  // namespace chorale::app
