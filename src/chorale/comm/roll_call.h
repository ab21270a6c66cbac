// Inside comm: rank 0's part in a monitored barrier. It asks for one rank after the other, so that it can name those
// that do not come; the others wait for rank 0 alone.
#pragma once

#include <algorithm>
#include <vector>

#include "chorale/comm/failure.h"

namespace chorale::comm {

class RollCall {
 public:
  // True when everybody has come. Throws CallFailed, after the last one, when some whose time was over have not.
  template <class HasCome>
  bool all_have_come(const Membership& membership, const Operation& operation, const HasCome& has_come) {
    for (; awaited_ < membership.size(); ++awaited_) {
      const bool skipped = !absent_.empty() && absent_.back() == awaited_;
      if (!skipped && !has_come(awaited_)) return false;
    }
    if (!absent_.empty()) raise_absence(membership, operation);
    return true;
  }
  // The rank that is asked for now.
  int awaited() const { return awaited_; }
  // The time of the awaited rank is over. Throws CallFailed, or, where all absent ranks are to be named, goes on to the
  // next one.
  void skip(const Membership& membership, Operation& operation);

 private:
  [[noreturn]] void raise_absence(const Membership& membership, const Operation& operation) const;

  int awaited_ = 0;
  std::vector<int> absent_;
};

}  // namespace chorale::comm
