// What main() of the program calls. It is apart from the commands, whose headers take seconds to compile.
#pragma once

namespace chorale::app {

// Runs the command that the arguments name; returns the exit code.
int run_chorale(int argc, char** argv);

}  // namespace chorale::app
