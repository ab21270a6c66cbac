// chorale-checkpoint, which `chorale checkpoint …` becomes.
#include "chorale/app/commands.h"
#include "chorale/app/program.h"
#include "chorale/base/descriptors.h"

int main(int argc, char** argv) {
  chorale::open_standard_descriptors();
  const chorale::app::AddCommand commands[] = {chorale::app::add_checkpoint};
  return chorale::app::run(argc, argv, commands);
}
