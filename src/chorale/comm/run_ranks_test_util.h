// Ranks for tests: threads of this process, or processes started by exec.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "chorale/comm/group.h"

namespace chorale::comm {

// Runs `body` on `size` ranks, each a thread with its own end of a new group. A rank that throws leaves the group; the
// first exception is rethrown here when all have ended.
void run_ranks(int size, const std::function<void(Group&)>& body, const GroupOptions& options = {});

}  // namespace chorale::comm
