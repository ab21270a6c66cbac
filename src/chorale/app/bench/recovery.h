// `chorale bench recovery`.
#pragma once

#include "chorale/app/commands.h"

namespace chorale::app {

void add_bench_recovery(CLI::App& bench, Work& work);

}  // namespace chorale::app
