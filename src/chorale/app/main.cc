// The chorale program.
#include <CLI/CLI.hpp>

#include "chorale/app/commands.h"

int main(int argc, char** argv) {
  CLI::App program("Chorale trains neural networks in C++.", "chorale");
  program.set_version_flag("--version", "chorale " CHORALE_VERSION);
  program.require_subcommand(1);
  for (const auto add : {chorale::app::add_doctor}) add(program);
  CLI11_PARSE(program, argc, argv);
  return 0;
}
