// chorale-elastic, which `chorale train TASK --elastic MIN:MAX …` becomes.
#include "chorale/app/commands.h"
#include "chorale/app/elastic/elastic_loop.h"
#include "chorale/app/program.h"
#include "chorale/app/sharded/shard_fully.h"
#include "chorale/app/train.h"
#include "chorale/base/descriptors.h"

namespace {

void add_elastic_train(CLI::App& program, chorale::app::Work& work) {
  chorale::app::add_train_with(program, work,
                               {.shard_fully = chorale::app::shard_fully, .make_loop = chorale::app::elastic_loop});
}

}  // namespace

int main(int argc, char** argv) {
  chorale::open_standard_descriptors();
  const chorale::app::AddCommand commands[] = {add_elastic_train, chorale::app::add_run};  // the launcher starts itself
  return chorale::app::run(argc, argv, commands);
}
