// The ranks of one node, from their start to their end.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chorale/launch/cores.h"
#include "chorale/launch/descriptor.h"
#include "chorale/launch/guardian.h"
#include "chorale/launch/lines.h"
#include "chorale/launch/nodes.h"
#include "chorale/launch/process.h"

namespace chorale::launch {

// How a rank ended.
struct RankEnd {
  int rank = 0;
  pid_t pid = 0;
  int wait_status = 0;
  std::chrono::system_clock::time_point when;
  bool failed() const { return wait_status != 0; }
};
// As a shell says it: the exit code, or 128 and the signal.
int exit_status_of(int wait_status);
// "exit code 3", "killed by SIGSEGV".
std::string describe(int wait_status);

class Ranks {
 public:
  struct Plan {
    ProcessPlan process;                             // what all have in common, less cpus and environment
    std::map<std::string, std::string> environment;  // likewise
    std::vector<RankCores> cores;                    // one for each
    NodePlan nodes;
    std::string log_dir, log_suffix;
  };
  // Starts none yet.
  Ranks(Plan plan, Guardian& guardian);
  ~Ranks();  // kills those that are left
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void start();
  void signal(int number);
  // Those that have ended since the last call. Whatever they left in their process groups is killed.
  std::vector<RankEnd> reap();
  bool any_running() const;

  // Output: what to poll, and what to do with the answer. False when there is nobody to read our own output.
  std::vector<pollfd> streams() const;
  bool forward(const std::vector<pollfd>& ready);
  const std::deque<std::string>& last_errors(int rank) const;
  std::map<pid_t, int> rank_of_process() const;

 private:
  struct Stream;
  struct Rank;

  Plan plan_;
  Guardian& guardian_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  bool output_is_open_ = true;
};

}  // namespace chorale::launch
