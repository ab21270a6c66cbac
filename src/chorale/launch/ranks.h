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
#include "chorale/launch/output.h"
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
// The status that a shell would give: the exit code, or 128 and the signal.
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
    Output* output = nullptr;  // where what they print goes
    Output* errors = nullptr;
  };
  // Starts none yet.
  Ranks(Plan plan, Guardian& guardian);
  ~Ranks();  // kills those that are left
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Starts up to so many; false when all are started. Where there are many, signals and ends are looked at in between.
  bool start_some(int most);
  // Starts one more, of this number, which no other had, with the cores of another that has ended. StateError
  // where that cannot be: then there is none.
  void start_in_place(int local, int rank);
  void signal(int number);
  void kill_one(int rank);
  // Kills those that have been stopped (SIGSTOP, a debugger) for longer than this; returns their numbers.
  std::vector<int> kill_stopped(std::chrono::milliseconds patience);
  // The ranks that have ended since the last call. Whatever they left in their process groups is killed.
  std::vector<RankEnd> reap();
  bool any_running() const;

  // What to poll (less the streams whose readers are behind: the rank that prints then waits), and what to do with the
  // answer.
  std::vector<pollfd> streams() const;
  void forward(const std::vector<pollfd>& ready);
  // False when what they have printed is all there is.
  bool may_print() const;
  // Why a log could not be written, the first time; empty while all is well.
  const std::string& log_problem() const { return log_problem_; }
  const std::deque<std::string>& last_errors(int rank) const;
  std::map<pid_t, int> rank_of_process() const;

 private:
  std::string log_path(int rank) const;
  void start(int local, int rank);
  struct Stream;
  struct Rank;
  const Rank* find(int rank) const;

  Plan plan_;
  Guardian& guardian_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::string log_problem_;
};

}  // namespace chorale::launch
