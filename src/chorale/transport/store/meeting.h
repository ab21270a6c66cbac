// How ranks come together at a store that may outlive them: what one group of ranks has left there must never be taken
// for another's.
//
// Note [Meetings]
// Under one name there is one meeting after the other. The first comer opens one with a random token, and everything
// that is written about it is kept below that token. A rank takes its seat, with its process, that process's start and
// what it wants to tell the others, and waits for the outcome, which is written once and is the last word:
//   complete       the rank that took the last seat says so
//   abandoned      a rank gave up (its time was over), or the process of a seat has ended
// A meeting with an outcome admits nobody: a rank that comes later opens the next one. A seat of this host whose
// process has ended makes an open meeting a stale one, left by a job that was killed: the next rank abandons it. So
// after a meeting was completed all its ranks have read the same seats, each taken by one process for this meeting and
// no other.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chorale/transport/store/store.h"

namespace chorale::transport {

struct MeetingPlan {
  std::string name;   // of keys in the store
  std::string where;  // of the store, for messages
  int rank = 0;
  int size = 1;
  // Names the launcher's run; ranks of different runs are refused. Empty: not known, fits all.
  std::string run = {};
};

struct Meeting {
  std::string token;
  // The entry by which the first comer opened it: another value means that there is a later meeting.
  std::string record_key, record;
  std::vector<std::string> told;  // by rank: what each wanted to tell
};

// Returns when all ranks are there. Says in the log which are missing, after a few seconds and then ever less often.
// Throws InvalidArgument when ranks do not fit together (two sizes, one rank twice, two runs), CommError when a rank
// does not come before the deadline, has given up or has ended; all that were there are then told.
Meeting meet(Store& store, const MeetingPlan& plan, std::string_view tell, Deadline deadline);
// The key of an entry of this meeting, for what its ranks agree upon later.
std::string meeting_key(const MeetingPlan& plan, const Meeting& meeting, std::string_view entry);

}  // namespace chorale::transport
