#include "chorale/comm/roll_call.h"

#include "chorale/base/error.h"

namespace chorale::comm {

void RollCall::skip(const Membership& membership, Operation& operation) {
  absent_.push_back(awaited_);
  if (!operation.wait_for_all) raise_absence(membership, operation);
  operation.deadline = within(operation.timeout);
}

void RollCall::raise_absence(const Membership& membership, const Operation& operation) const {
  std::string who, there;
  for (int peer : absent_) who += concat(who.empty() ? "" : ", ", membership.global(peer));
  for (int peer = 0; peer < awaited_; ++peer) {
    if (std::find(absent_.begin(), absent_.end(), peer) == absent_.end())
      there += concat(there.empty() ? "" : ", ", membership.global(peer));
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(operation.timeout).count();
  throw CallFailed{concat("rank ", membership.global(0), " timed out in the monitored barrier after ", ms, " ms: rank",
                          absent_.size() > 1 ? "s " : " ", who, " did not reach it (seen: ", there, ")"),
                   membership.global(absent_.front())};
}

}  // namespace chorale::comm
