// `chorale bench gpu-losses`.
#pragma once

#include "chorale/app/commands.h"

namespace chorale::app {

void add_bench_gpu_losses(CLI::App& bench, Work& work);

}  // namespace chorale::app
