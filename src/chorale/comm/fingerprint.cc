// Did everybody make the same call?
#include "chorale/comm/shm_group.h"

namespace chorale::comm {
namespace {

[[noreturn, gnu::cold, gnu::noinline]] void raise_difference(const ShmGroup& group, const Operation& operation) {
  std::vector<Fingerprint> prints;
  for (int rank = 0; rank < group.size; ++rank)
    prints.push_back(group.segment.slot(rank, operation.number).fingerprint);
  raise_difference(group.membership, prints);
}

}  // namespace

void check_fingerprints(const ShmGroup& group, const Operation& operation) {
  for (int peer = 0; peer < group.size; ++peer) {
    if (!(group.segment.slot(peer, operation.number).fingerprint == operation.print)) [[unlikely]]
      raise_difference(group, operation);
  }
}

}  // namespace chorale::comm
