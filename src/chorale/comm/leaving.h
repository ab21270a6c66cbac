// How a rank leaves a group when it is done.
//
// Note [Leaving together]
// A rank that left a call out may make all its other calls, come to its end and think that all is well, while others
// wait for it in one call more. So a rank that is done does not go at once: it says that it leaves, and then waits a
// while until each of the others has left too, or ended. One that enters a call instead shows that this rank left one
// out.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>

#include "chorale/comm/group.h"

namespace chorale::comm {

// The seconds that CHORALE_LEAVE_PATIENCE says, or 5. InvalidArgument when it says something else.
std::chrono::milliseconds leave_patience();

// Finishes what is in flight, leaves the group, and waits until the others have left too, for at most `patience`, or
// else leave_patience(). Throws CommError when one of them makes a call instead, which this rank has left out, or
// throws. True when all have left. The group is not valid after it.
bool leave(Group& group, std::optional<std::chrono::milliseconds> patience = std::nullopt);

// Called by a rank that goes on without some of the others: this group and all that were made out of it, or out of the
// same one, fail at once. Nothing is finished first, and whoever waits for this rank in one of them is told `why`.
void abandon(const Group& group, const std::string& why);

// What an engine provides for leaving; with the context's lock.
class Leaver {
 public:
  virtual void finish_calls(std::unique_lock<std::mutex>& lock) = 0;
  // This rank makes no more calls; for the others it has left from now on.
  virtual void say_goodbye() = 0;
  // What is known of a peer after that.
  enum class Does : uint8_t { kStays, kLeft, kCalled, kThrew };
  virtual Does after_goodbye(int peer) = 0;
  // Which rank that is, and its last call.
  virtual std::string describe_peer(int peer) const = 0;

 protected:
  ~Leaver() = default;
};

}  // namespace chorale::comm
