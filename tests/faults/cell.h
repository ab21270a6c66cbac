// A cell of the fault matrix: what goes wrong, in which call, among how many ranks, connected how. All else follows
// from its seed, so that a cell does the same whenever it is run.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "calls.h"

namespace chorale::faults {

enum class Fault {
  kKill,      // SIGKILL as it enters the call
  kKillSoon,  // SIGKILL at any moment of a row of calls
  kStop,      // SIGSTOP, likewise; woken when all others have ended
  kStopSoon,
  kExit,       // exits with 0 and tells nobody
  kException,  // throws
  kShape,      // makes the call with another shape, and so on
  kDtype,
  kReduction,
  kRoot,
  kSkip,        // leaves the call out
  kCut,         // its connection breaks
  kSlow,        // comes late, but before the deadline
  kDamage,      // its control message is damaged
  kDamageData,  // its data is damaged, with checksums
};

struct Cell {
  Fault fault;
  const CallRow* call;
  std::string column;  // threads, shm, tls, ucx
  int size = 2;
  uint64_t seed = 0;
  int steps = 2;  // calls that go well before

  // fault/call/column/size/seed/steps
  static Cell parse(std::string_view text);

  int culprit() const;
  int64_t count() const;  // elements of the call
  int root() const;
  bool between_hosts() const { return column == "tls" || column == "ucx"; }
  bool in_a_loop() const;  // the call is made again and again until it fails
  // Nobody may take the call for done: all ranks are in it, and it is not the same for all.
  bool ends_with_the_call() const;
  std::chrono::milliseconds deadline() const;
  static int host_of(int rank) { return rank % 2; }  // between hosts
  // Whether errors may blame this rank. Meaningless where all is well.
  bool may_name(int rank) const;
};

// Those that make sense, as FAULT CALL.
std::vector<std::string> existing_cells();

}  // namespace chorale::faults
