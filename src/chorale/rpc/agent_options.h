#pragma once

#include <string>
#include <vector>

#include "chorale/dist_autograd/contexts.h"
#include "chorale/rpc/faults.h"
#include "chorale/rpc/served.h"
#include "chorale/rpc/worker.h"

namespace chorale::rpc {

struct AgentOptions {
  // Has at most 127 characters out of A-Z a-z 0-9 - _ :, and is unique among workers. None: worker0, worker1, ….
  std::optional<std::string> name{};
  // A worker that joins a group that changes must say its number. Otherwise it is the rank in the group.
  std::optional<int> id{};
  std::vector<Served> serves{};
  // How long a call waits for its answer, unless it says otherwise; 0: for ever.
  Timeout timeout = std::chrono::seconds(60);
  // Threads that run requests, not counting those that wait for answers themselves; and all of them.
  int threads = 16;
  int most_threads = 256;
  // What is left at shutdown is an error; otherwise a line in the log.
  bool check_leaks = false;
  // Whether references that are still held at shutdown are deleted.
  bool delete_references = true;
  // The time before a control message is sent again; each time it is half as much longer.
  std::chrono::nanoseconds retry_after = std::chrono::seconds(1);
  Faults faults{};
  // How the agent is made (rpc/backend.h).
  std::string backend = "group";
  // How gradients are awaited (Note [Smart backward] in dist_autograd/contexts.h).
  dist_autograd::Mode backward = dist_autograd::Mode::kSmart;
};

}  // namespace chorale::rpc
