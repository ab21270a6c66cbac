// `--dry-run`: what would be trained, and what it takes.
#pragma once

#include <cstdio>

#include "chorale/train/task.h"

namespace chorale::train {

// Makes the model and takes one step on one rank's part of a batch, to measure its memory; leaves nothing behind.
void dry_run(const TaskKind& kind, const TrainOptions& options, int ranks, std::FILE* out);

}  // namespace chorale::train
