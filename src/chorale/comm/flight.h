// The flight recorder: the last calls of a rank in a group, kept always and dumped when something fails.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "chorale/comm/membership.h"
#include "chorale/comm/operation.h"

namespace chorale::comm {

class FlightRecorder {
 public:
  static constexpr size_t kCalls = 1000;

  // Calls are numbered by the recorder, from 0; the number stays valid until kCalls later calls.
  uint64_t enter(const Operation& operation);
  void leave(uint64_t call, bool failed);

  // Empty where one thread made the last collectives of this rank; else which threads did, each with the last one.
  std::string threads(const Membership& membership) const;

  // {"group": …, "rank": …, "calls": [{"number", "kind", "dtype", "count", …, "state", "start_us", "end_us"}, …]}
  std::string json(const Membership& membership, const std::string& error) const;
  // Writes it to a new file, which only its owner may read, in CHORALE_FLIGHT_DIR (the folder for temporary files if
  // that is not set) and returns the path; empty when that failed. Never throws.
  std::string dump(const Membership& membership, const std::string& error) const noexcept;

 private:
  enum class State : uint8_t { kPending, kDone, kFailed };
  struct Entry {
    uint64_t call = 0;
    Fingerprint print;
    uint32_t number = 0;
    int32_t peer = -1;
    int32_t thread = 0;  // that entered it
    State state = State::kPending;
    std::chrono::steady_clock::time_point start, end;
  };
  std::array<Entry, kCalls> entries_;
  uint64_t next_ = 0;
};

}  // namespace chorale::comm
