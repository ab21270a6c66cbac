// `chorale bench guards`.
#pragma once

#include "chorale/app/commands.h"

namespace chorale::app {

void add_bench_guards(CLI::App& bench, Work& work);

}  // namespace chorale::app
