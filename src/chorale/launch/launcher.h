// `chorale run`: starts the ranks of this node, stays with them to the end, and leaves nothing behind.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "chorale/launch/elastic_limits.h"

namespace chorale::launch {

// The exit status of every command whose work is done, but whose output could not be written.
inline constexpr int kOutputLost = 4;

struct LaunchOptions {
  int ranks = 1;  // on this node
  int nodes = 1;
  int node_rank = 0;
  std::string rendezvous;  // HOST:PORT of node 0, when there are several nodes
  int max_restarts = 0;
  std::string log_dir;                                         // empty: no files
  std::chrono::milliseconds grace = std::chrono::seconds(10);  // between SIGTERM and SIGKILL
  std::string chaos;  // a plan or a seed (transport/fabric/chaos.h) for the first start; empty: no faults on purpose
  bool checksum = false;              // of payloads (comm/group.h)
  std::string fabric;                 // between hosts (transport/fabric/fabric_name.h); empty: the default
  std::vector<std::string> command;   // a program and its arguments
  std::vector<int> final_statuses{};  // of ranks that it is no use to start again
  // The job goes on without ranks that die, and gets others in their place.
  std::optional<ElasticLimits> elastic{};
  // HOST:PORT of a launcher of an elastic job on several nodes: this node joins it. Instead of `rendezvous`.
  std::string join{};
};

// The exit status: 0 when every rank ended with 0, else that of the first rank that failed; 128 + N when it was killed
// by signal N, or when the launcher was told to stop by signal N; 126 when a rank could not be started; 127 when there
// is no such program; 1 when a node was lost; kOutputLost. Says on standard error which rank it was, and why.
int launch(const LaunchOptions& options);

}  // namespace chorale::launch
