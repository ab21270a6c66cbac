// Did everybody make the same call?
#include "chorale/base/error.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {
namespace {

// Throws unless the group leaves it to others.
[[gnu::cold, gnu::noinline]] void look_at_difference(const ShmGroup& group, const Operation& operation) {
  std::vector<Fingerprint> prints;
  for (int rank = 0; rank < group.size; ++rank) {
    const shm::CallSlot& slot = group.segment.slot(rank, operation.number);
    // Words that are damaged say nothing about a call.
    if (slot.check != slot.right_check(operation.number, slot.fingerprint.weight()))
      raise_damage(group, rank, "the control message");
    prints.push_back(slot.fingerprint);
  }
  if (!group.inner) raise_difference(group.membership, prints);
}

}  // namespace

bool check_fingerprints(const ShmGroup& group, const Operation& operation) {
  const uint64_t weight = operation.print.weight();
  for (int peer = 0; peer < group.size; ++peer) {
    const shm::CallSlot& slot = group.segment.slot(peer, operation.number);
    if (!(slot.fingerprint == operation.print) || slot.check != slot.right_check(operation.number, weight))
        [[unlikely]] {
      look_at_difference(group, operation);
      return false;
    }
  }
  return true;
}

void raise_damage(const ShmGroup& group, int peer, const char* what) {
  throw CallFailed{concat(what, " of rank ", group.global(peer), " (", group.condition(peer),
                          ") is damaged: its checksum is wrong; bad memory, or something wrote where it must not"),
                   group.global(peer)};
}

}  // namespace chorale::comm
