#include "chorale/comm/device_part.h"

namespace chorale::comm {
namespace {

struct Carried {
  std::shared_ptr<DevicePart> part;
  void operator()() const {}  // it was done before the call ended
};

}  // namespace

void set_device_part(Operation& operation, std::shared_ptr<DevicePart> part) {
  // First, where device_part_of() looks: a call may carry a timeout's extension already.
  operation.finish.insert(operation.finish.begin(), Carried{std::move(part)});
}
DevicePart* device_part_of(const Operation& operation) {
  if (operation.finish.empty()) [[likely]]
    return nullptr;
  const Carried* const carried = operation.finish.front().target<Carried>();
  return carried ? carried->part.get() : nullptr;
}

const SmallVector<Chunk, 2>& given(const Operation& operation) {
  const DevicePart* const part = device_part_of(operation);
  return part ? part->give : operation.give;
}
const SmallVector<Chunk, 2>& taken(const Operation& operation) {
  const DevicePart* const part = device_part_of(operation);
  return part ? part->take : operation.take;
}

}  // namespace chorale::comm
