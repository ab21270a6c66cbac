// `chorale doctor`: what this machine offers.
#include <iostream>

#include "chorale/app/commands.h"
#include "chorale/base/parallel.h"

namespace chorale::app {

void add_doctor(CLI::App& program) {
  program.add_subcommand("doctor", "Show what this machine offers")->callback([] {
    std::cout << "threads  " << thread_count() << '\n';
  });
}

}  // namespace chorale::app
