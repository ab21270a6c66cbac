// `chorale train` for programs that have more of the library than `chorale`.
#pragma once

#include "chorale/app/commands.h"
#include "chorale/train/full_sharding.h"
#include "chorale/train/step_loop.h"

namespace chorale::app {

// What only some programs have; an option that asks for it in another one becomes that program.
struct TrainParts {
  train::ShardFully shard_fully{};                                // --fsdp
  std::function<std::unique_ptr<train::StepLoop>()> make_loop{};  // --elastic
};
// Does what add_train() does, with these parts, of which add_train() has none.
void add_train_with(CLI::App& program, Work& work, const TrainParts& parts);

}  // namespace chorale::app
