// How much of the machine this process may use: what it has, less what a container or a scheduler took away.
#pragma once

#include <cstdint>

namespace chorale {

// Cores that the scheduler lets this process run on, further limited by a control group's quota (rounded up).
int usable_cores();
// Cores of the whole machine.
int machine_cores();

struct Room {
  uint64_t total_bytes;
  uint64_t free_bytes;
};
// Memory, within the limit of the control group if it has one. Pages that the kernel can drop count as free.
Room memory_room();
// /dev/shm, where MPI, NCCL and other processes exchange data; zeros if there is none.
Room shared_memory_room();

}  // namespace chorale
