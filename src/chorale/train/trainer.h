// The loop: steps, with metrics, evaluations, samples and checkpoints in between, until the end or Ctrl-C; from the
// beginning or from a checkpoint.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>

#include "chorale/train/checkpoint.h"
#include "chorale/train/interrupt.h"
#include "chorale/train/progress.h"
#include "chorale/train/run_folder.h"
#include "chorale/train/run_log.h"
#include "chorale/train/step_loop.h"
#include "chorale/train/stepper.h"

namespace chorale::train {

struct Job {
  const TaskKind& kind;
  const TrainOptions& options;
  const OptionTable& table;  // has the values that are written down
  const comm::Group& group;
  std::filesystem::path folder;  // of the run; only rank 0 looks at it
  Output& out;                   // only rank 0 writes
  json::Object facts{};          // about program and machine, for the log
  ShardFully shard_fully{};      // in programs that have it
  StepLoop* loop = nullptr;      // where ranks may die; the group is its own
};

// How many steps there are, and where an epoch ends.
struct Plan {
  int64_t steps_per_epoch = 0;
  int64_t steps = 0;
  int64_t examples_of_rank = 0;  // in one forward
};
// InvalidArgument when the batch cannot be dealt to this many ranks, or is larger than the data.
Plan make_plan(const TrainOptions& options, int64_t examples, int ranks);

enum class Ending : uint8_t { kDone, kInterrupted, kLeft };  // kLeft: the others go on without this rank
// Trains as one rank of the group. What rank 0 throws, the others throw as ToldByRank0; but all throw NotFinite.
Ending train(const Job& job);

// Loss or gradients are not finite, and the options say that this ends the job: nothing was updated or saved since they
// were. Starting again from the last checkpoint would end alike.
class NotFinite : public StateError {
 public:
  using StateError::StateError;
};

}  // namespace chorale::train
