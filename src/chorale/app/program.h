// The chorale program, as a function.
#pragma once

#include <string_view>

namespace chorale::app {

// Runs a command line; returns the exit status: 0, 1 when the command failed (or one of its own), 2 when the command
// line is wrong.
int run(int argc, const char* const* argv);

std::string_view version();

}  // namespace chorale::app
