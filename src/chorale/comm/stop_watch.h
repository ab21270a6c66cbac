// Inside comm: ranks that are stopped, and for how long.
//
// Note [Patience with stopped ranks]
// A rank that computes may take as long as the call's limit allows. One that was stopped, by a signal or a debugger,
// does not come by itself. A rank that waits names it after five seconds (WaitingWord), and gives up when it was
// stopped for CHORALE_STOP_PATIENCE seconds without a break: 300 unless that is set. On one host the system says which
// process is stopped; between hosts a rank counts as stopped when its host answers and it does not.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "chorale/comm/failure.h"

namespace chorale::comm {

class StopWatch {
 public:
  StopWatch();

  // Called now and then while this operation waits: throws CallFailed when this rank of the group (-1: one of them) was
  // stopped for too long. `who_is` describes a rank.
  void look(const Membership& membership, const Operation& operation, int only,
            const std::function<bool(int)>& is_stopped, const std::function<std::string(int)>& who_is);

 private:
  using Clock = Deadline::Clock;

  const Clock::duration patience_;
  Clock::time_point last_, next_;
  std::map<int, Clock::time_point> since_;
};

}  // namespace chorale::comm
