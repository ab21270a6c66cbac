// What `chorale bench rpc` measures in one of its two ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace chorale::app {

struct RpcCase {
  const char* name;
  int64_t bytes;    // that a tensor of it has
  int64_t copied;   // that cross from one process to the other, in both directions
  int trips;        // there and back
  double at_least;  // times PyTorch's speed
  double torch_us;  // PyTorch's, as it was measured once on a quiet machine: for where it cannot be measured
};
const std::vector<RpcCase>& rpc_cases();

struct RpcRank {
  int rank = 0;
  std::string store, only;
  double seconds = 1;
  // The address of rank 0 where the ranks are on two hosts; empty: both are on this one.
  std::string address;
};
// Meets the other rank at the store, runs every case whose name holds `only`, and prints (on rank 0) a line for each:
// case, p50, p99 and the floor in microseconds, separated by tabs.
void run_rpc_rank(const RpcRank& options);

}  // namespace chorale::app
