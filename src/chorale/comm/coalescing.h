// A scope in which collectives are collected and started together.
#pragma once

#include "chorale/comm/group.h"

namespace chorale::comm {

// Between construction and end() nothing is sent: calls of the group are only collected, and the works they return must
// not be used. All must be of one kind and one reduction, else StateError; so is a scope within a scope.
class Coalescing {
 public:
  explicit Coalescing(const Group& group);
  // Ends the scope and waits, unless end() was called or an exception is passing.
  ~Coalescing() noexcept(false);
  Coalescing(const Coalescing&) = delete;
  Coalescing& operator=(const Coalescing&) = delete;

  // Starts what was collected; the work is done when all of it is.
  Work end();

 private:
  std::shared_ptr<GroupState> state_;
  Operations collected_;
  int exceptions_;
  bool ended_ = false;
};

}  // namespace chorale::comm
