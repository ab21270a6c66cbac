// Inside comm: how the failure of a call is raised and told, the same whatever moves the data.
#pragma once

#include <chrono>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include "chorale/comm/flight.h"

namespace chorale::comm {

class RankContext;

// Thrown by an algorithm that has seen the group's failure; the engine turns it into the error that the caller gets.
struct GroupFailed {};
// Thrown where the failure is found; the engine breaks the group with it.
struct CallFailed {
  std::string reason;
  int culprit = -1;     // global rank
  bool unsure = false;  // another rank may know the culprit, and is given a moment to say so
};
inline constexpr std::chrono::milliseconds kUnsurePatience{200};  // that moment
// Throws the reason: at once, or, where it is unsure, when the operation's patience is over.
void raise_when_sure(Operation& operation, const CallFailed& reason);

// The first failure of a group, as the rank that found it has told it.
struct Failure {
  int reporter = -1, culprit = -1;  // global ranks; -1: nobody could say it
  std::string text;
};

// How its reason begins when ranks made different calls. The text is all of a failure that travels: the other ranks
// know the kind of it by this.
inline constexpr std::string_view kDifferentCalls = "ranks made different calls:";

// Throws CallFailed, naming everybody's call. `prints` are those of the members, by group rank, and not all the same;
// of kind kNone where a call is not known.
[[noreturn, gnu::cold]] void raise_difference(const Membership& membership, std::span<const Fingerprint> prints);

// A message came that does not fit what the receiver asked for.
[[noreturn, gnu::cold]] void raise_misfit(const Membership& membership, int from, uint64_t bytes, DType dtype,
                                          const Operation& receive);

// Throws the StateError of a call in a forked child of the rank's process, whose memory and threads it must not touch.
[[noreturn, gnu::cold]] void raise_in_child(std::string_view call, const Membership& membership,
                                            const RankContext& context);

// Errors show global ranks only, which are what users know: also for the root of a call.
std::string describe(const Membership& membership, const Fingerprint& print);
// "rank 1 (group world of 4)"; where its ranks are other ones than the job's, "rank 5 (group tp of 2: ranks 1, 5)".
std::string who_is_this(const Membership& membership);
// "[all_reduce #7] rank 1 (group world of 4): "
std::string prefix_of(const Membership& membership, const Operation& operation);
// What the caller gets: prefix, reason, and where the last calls were written.
std::exception_ptr error_of(const Membership& membership, const Operation& operation, const std::string& reason,
                            int culprit, const FlightRecorder& flight);
// What is told to a rank other than 0 whose monitored barrier failed, and to any other call of a group that broke
// elsewhere.
std::string reason_of_a_broken_group(const Membership& membership, const Operation& operation,
                                     const std::string& reason);
// The time is over, and `culprit` (a group rank; -1: none) is to blame; `who` says what is known of it. Throws
// CallFailed.
[[noreturn, gnu::cold]] void raise_timeout(const Membership& membership, const Operation& operation, int culprit,
                                           const std::string& who);
// What a rank does, as far as it is known: "last entered all_reduce … #7, and then threw: out of memory".
std::string where_and_thrown(const std::string& last_call, const std::string& thrown);
// A rank that waits long says for which ranks: after five seconds, and then whenever the time has doubled.
class WaitingWord {
 public:
  bool is_due(const Operation& operation) const { return Deadline::Clock::now() - operation.issued >= next_; }
  // `who` are descriptions of the awaited ranks.
  void say(const Membership& membership, const Operation& operation, std::span<const std::string> who);

 private:
  Deadline::Clock::duration next_ = std::chrono::seconds(5);  // after it was issued
};
// "1.5 s"
std::string in_seconds(Deadline::Clock::duration time);

}  // namespace chorale::comm
