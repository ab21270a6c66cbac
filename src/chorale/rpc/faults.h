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
  // Control messages of these kinds are delivered twice; with `most_delay`, the second time up to eight times as much
  // later.
  std::set<MessageKind> repeat{};
  // All others, requests and answers, are sent up to so much later, so that they overtake each other. With a seed the
  // times follow from it, and `fail` and `repeat` concern a half of the messages.
  std::chrono::nanoseconds most_delay{0};
  uint64_t seed = 0;

  // The kinds that are sent again when they fail.
  static std::set<MessageKind> retried() {
    return {MessageKind::kForkRequest, MessageKind::kChildAccept, MessageKind::kUserDelete, MessageKind::kCleanup};
  }
  // Control messages fail three times, and plain calls leave late.
  static Faults usual() {
    constexpr std::chrono::milliseconds kLate(1500);
    Faults faults;
    faults.fail = retried();
    faults.delay = {{MessageKind::kCall, kLate}, {MessageKind::kOp, kLate}};
    return faults;
  }
  bool empty() const { return fail.empty() && delay.empty() && repeat.empty() && most_delay.count() == 0; }
  // Everything at once, in an order that follows from the seed: messages late by up to `most_delay`, control messages
  // failed or delivered twice.
  static Faults chaos(uint64_t seed, std::chrono::nanoseconds most_delay = std::chrono::microseconds(500)) {
    Faults faults;
    faults.fail = faults.repeat = retried();
    faults.most_delay = most_delay;
    faults.seed = seed;
    return faults;
  }
};

}  // namespace chorale::rpc
