// What `chorale bench collectives` measures in one of its ranks.
#pragma once

#include <string>

namespace chorale::app {

// Meets the other ranks at the file, runs every case whose name holds `only`, and prints (on rank 0) a line for each:
// case, bytes, p50 and p99 in microseconds, wrong elements.
void run_collectives_rank(int rank, int size, const std::string& store, const std::string& only, int64_t most_bytes);

}  // namespace chorale::app
