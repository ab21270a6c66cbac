// chorale-sharded, which `chorale train gpt|bert --fsdp …` becomes.
#include "chorale/app/commands.h"
#include "chorale/app/program.h"
#include "chorale/app/sharded/shard_fully.h"
#include "chorale/app/train.h"
#include "chorale/base/descriptors.h"

namespace {

void add_sharded_train(CLI::App& program, chorale::app::Work& work) {
  chorale::app::add_train_with(program, work, {.shard_fully = chorale::app::shard_fully});
}

}  // namespace

int main(int argc, char** argv) {
  chorale::open_standard_descriptors();
  const chorale::app::AddCommand commands[] = {add_sharded_train, chorale::app::add_run};  // the launcher starts itself
  return chorale::app::run(argc, argv, commands);
}
