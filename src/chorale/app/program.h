// The chorale program, as a function.
#pragma once

#include <span>
#include <string_view>

#include "chorale/app/commands.h"

namespace chorale::app {

// Runs a command line with these commands; returns the exit status: 0, 1 when the command failed (or one of its own), 2
// when the command line is wrong, 4 when the work is done but its output could not be written. Nothing is thrown.
int run(int argc, const char* const* argv, std::span<const AddCommand> commands);
// Up to where work would start: reads the options and the files that they name, and says what is wrong with them.
int plan(int argc, const char* const* argv, std::span<const AddCommand> commands);

std::string_view version();

}  // namespace chorale::app
