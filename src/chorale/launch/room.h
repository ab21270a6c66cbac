// Whether this machine can hold the ranks that are to be started on it.
#pragma once

#include <cstdint>

namespace chorale::launch {

struct RankNeeds {
  int ranks = 1;
  int descriptors = 2;       // of the launcher, for each rank
  uint64_t bytes = 1 << 20;  // of memory, at least, for each rank
};

// InvalidArgument says which limit they are over, by how much, and what to do: before the first of them is started.
// Memory, the limits on processes of the machine, the control group and the user, and the launcher's descriptors.
void check_room(const RankNeeds& needs);

}  // namespace chorale::launch
