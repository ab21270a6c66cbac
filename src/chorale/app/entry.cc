#include "chorale/app/entry.h"

#include "chorale/app/commands.h"
#include "chorale/app/program.h"

namespace chorale::app {

int run_chorale(int argc, char** argv) { return run(argc, argv, chorale_commands()); }

}  // namespace chorale::app
