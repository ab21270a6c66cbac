// `chorale bench gpu`.
#pragma once

#include "chorale/app/commands.h"

namespace chorale::app {

void add_bench_gpu(CLI::App& bench, Work& work);

}  // namespace chorale::app
