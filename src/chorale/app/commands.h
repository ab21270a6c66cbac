// The subcommands of the chorale program. A new one is a file that defines its add_… function, a line here and a line in
// the table in main.cc.
#pragma once

#include <CLI/App.hpp>

namespace chorale::app {

// Each adds its subcommand, with options and a callback that does the work, to the program.
void add_doctor(CLI::App& program);

}  // namespace chorale::app
