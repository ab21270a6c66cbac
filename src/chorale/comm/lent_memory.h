// Inside comm: memory of a device that a rank lends to the others of a group (Note [Calls on a shared device] in
// device_calls.h).
#pragma once

#include <chrono>
#include <mutex>
#include <vector>

#include "chorale/device/peers.h"

namespace chorale::comm {

// Memory that a call used may be written again when a later call of the group is done: ranks enter that one only after
// they have read all of this one. What the last call of a group used goes to other groups after the group's deadline.
class LentMemory {
 public:
  LentMemory(Device device, std::chrono::milliseconds timeout);
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  struct Lent {
    PeerHandle memory;
    uint64_t call = 0;  // by which it is used
  };
  // Lends memory for a call; one that needs none gets its number only.
  Lent lend(size_t bytes);
  // The call is done: what earlier ones used is free.
  void note_done(const Lent& lent);

 private:
  const Device device_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  uint64_t calls_ = 0;
  std::vector<PeerHandle> free_;
  std::vector<Lent> lent_;
};

}  // namespace chorale::comm
