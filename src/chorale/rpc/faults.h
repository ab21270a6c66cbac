// Faults on purpose, for tests of what is built on calls: messages of some kinds are not sent, or late.
#pragma once

#include <chrono>
#include <map>
#include <set>

#include "chorale/rpc/message.h"

namespace chorale::rpc {

struct Faults {
  // Requests of these kinds fail: each distinct one so many times, then it is sent. A failed request is an error of
  // kind kInjected at once, and nothing was sent.
  std::set<MessageKind> fail{};
  int times = 3;
  // Requests of these kinds are sent so much later.
  std::map<MessageKind, std::chrono::nanoseconds> delay{};
  // Control messages of these kinds are delivered twice.
  std::set<MessageKind> repeat{};

  // The kinds that are sent again when they fail.
  static std::set<MessageKind> retried() {
    return {MessageKind::kForkRequest, MessageKind::kChildAccept, MessageKind::kUserDelete, MessageKind::kCleanup};
  }
  bool empty() const { return fail.empty() && delay.empty() && repeat.empty(); }
};

}  // namespace chorale::rpc
