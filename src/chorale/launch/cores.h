// Which cores each rank of a host gets.
#pragma once

#include <vector>

namespace chorale::launch {

struct RankCores {
  std::vector<int> cpus;  // logical processors to run on, as the operating system counts them; empty: wherever it likes
  int threads = 1;        // as many as it has cores
};

// Shares out the cores that this process may use, neighbours in memory together: whole cores while there is one for
// each rank, hyper-threads after that; with more ranks than hyper-threads nobody is bound. Where a quota allows less
// than the cores, there are fewer threads.
std::vector<RankCores> share_cores(int ranks);

}  // namespace chorale::launch
