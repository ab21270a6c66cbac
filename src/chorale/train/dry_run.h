// `--dry-run`: what would be trained, and what it takes.
#pragma once

#include <cstdio>

#include "chorale/comm/group.h"
#include "chorale/train/full_sharding.h"
#include "chorale/train/task.h"

namespace chorale::train {

// Makes the model and takes one step on one rank's part of a batch, to measure its memory; leaves nothing behind. The
// job would have `ranks`. Those of the group take the step, as many as share a model; the first prints.
void dry_run(const TaskKind& kind, const TrainOptions& options, int ranks, const comm::Group& group, std::FILE* out,
             const ShardFully& shard_fully = {});

}  // namespace chorale::train
