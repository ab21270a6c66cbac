// Rows that have no kernel for GPUs yet run on the host, between copies. It costs the copies and a wait, so the log
// says it, once for each row.
#pragma once

#include <span>

#include "chorale/kernel/kernel_args.h"

namespace chorale::eager {

void run_through_host(const kernel::KernelArgs& args);
// The names of these rows.
std::span<const char* const> rows_through_host();

}  // namespace chorale::eager
