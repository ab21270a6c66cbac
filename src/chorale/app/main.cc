#include "chorale/app/commands.h"
#include "chorale/app/program.h"
#include "chorale/base/descriptors.h"

int main(int argc, char** argv) {
  chorale::open_standard_descriptors();
  return chorale::app::run(argc, argv, chorale::app::chorale_commands());
}
