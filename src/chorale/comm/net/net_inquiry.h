// Inside comm: which rank holds up a call between hosts?
//
// Note [Finding the culprit]
// A rank that waits is held up by one that waits itself, perhaps for a third. So a rank that has seen a call other
// than its own, or whose time is over, asks around in which call each rank is. The threads of the fabrics answer,
// whatever their ranks wait for; of neighbours it is written in the segment of the host. To blame is, in this order,
//
//   a rank that made another call than most;
//   one that is stopped, or does not answer;
//   one that has not come to this call yet;
//   and if all are there and answer, the one that this rank waits for.
//
// Every rank that asks gets the same answers, so all ranks name the same one.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "chorale/comm/net/net_group.h"

namespace chorale::comm {

class NetInquiry {
 public:
  using Clock = Deadline::Clock;

  // An inquiry about a message, which has no number, and there is nothing to compare.
  explicit NetInquiry(NetGroup& group) : group_(group) {}
  NetInquiry(NetGroup& group, uint32_t number, const Fingerprint& print);

  // A message of the peer shows what call it makes.
  void note(int peer, const Fingerprint& print);
  // Somebody is known to make another call: this one must not succeed.
  bool differs() const { return differs_since_.has_value(); }
  // Called now and then while waiting. Throws CallFailed when calls differ and everybody's is known, or time enough was
  // given to find out.
  void look_at_calls(std::span<const int> awaited);
  // Called now and then when the time is over: the rank to blame (-1: none is known). Nothing while that is being found
  // out. Ranks are those of the group, in ascending order.
  std::optional<int> find_culprit(std::span<const int> awaited);

 private:
  void ask();
  void learn(int peer);
  std::optional<int> silent_one();
  std::optional<int> late_one() const;

  NetGroup& group_;
  const uint32_t number_ = 0;
  const Fingerprint print_;
  std::vector<std::optional<Fingerprint>> calls_;  // by group rank, of this number
  std::optional<Clock::time_point> differs_since_, late_since_;
  Clock::time_point next_question_;
};

}  // namespace chorale::comm
