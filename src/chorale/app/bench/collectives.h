// What `chorale bench collectives` measures in one of its ranks, and what the figures are held against.
#pragma once

#include <string>
#include <vector>

#include "chorale/app/bench/bench.h"

namespace chorale::app {

struct CollectiveCase {
  std::string name, op;  // all_reduce/f32/4096/n2/registered; all_reduce
  int64_t bytes = 0;
  bool registered = true;  // our tensors; else memory that peers cannot reach
};
std::vector<CollectiveCase> collective_cases(int ranks, int64_t most_bytes);

// Meets the other ranks at the file, runs every case whose name holds `only`, and prints (on rank 0) a line for each:
// case, bytes, p50 and p99 in microseconds, wrong elements. `few`: as few calls as PyTorch's peer makes.
void run_collectives_rank(int rank, int size, const std::string& store, const std::string& only, int64_t most_bytes,
                          bool few);

// Says which of the bars that docs/dev/bench.md lists these rows reach, and which they miss.
void print_bars(const std::vector<BenchRow>& rows, int ranks, int hosts, const std::string& fabric);

}  // namespace chorale::app
