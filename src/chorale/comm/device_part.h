// Inside comm: the rest of a call that devices move themselves, when all ranks have come (Note [Calls by devices] in
// device_calls.h).
#pragma once

#include <memory>

#include "chorale/comm/operation.h"

namespace chorale::comm {

// The engine calls this with the lock. What it throws breaks the group.
class DevicePart {
 public:
  virtual ~DevicePart() = default;
  // Moves it as far as it goes without waiting for others; true when it is done.
  virtual bool step() = 0;
  // Whether it runs, or waits only for other ranks.
  virtual bool has_begun() const = 0;
  // The group has failed: nothing of it goes on.
  virtual void abandon() noexcept = 0;

  SmallVector<Chunk, 2> give, take;  // in the device's memory
  bool is_on = false;                // all ranks have come: the host's engine only watches
};

// An operation carries its part as what is to be done with the result of the host's call.
void set_device_part(Operation& operation, std::shared_ptr<DevicePart> part);
// Null where it has none, or has ended.
DevicePart* device_part_of(const Operation& operation);
inline bool is_on_device(const Operation& operation) {
  const DevicePart* const part = device_part_of(operation);
  return part && part->is_on;
}

// What the caller gave and gets, wherever it is.
const SmallVector<Chunk, 2>& given(const Operation& operation);
const SmallVector<Chunk, 2>& taken(const Operation& operation);

}  // namespace chorale::comm
