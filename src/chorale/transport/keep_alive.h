// How long a host, or a launcher, may be silent before the others take it for lost: one number for all of them.
#pragma once

#include <chrono>

namespace chorale::transport {

// CHORALE_KEEP_ALIVE in seconds, else 10 s. An outage of up to half of it is survived: TCP repeats what was lost after
// at most as long again. A connection that is closed counts at once.
std::chrono::milliseconds keep_alive();

// How long others wait for a rank that is stopped (a signal, a debugger): CHORALE_STOP_PATIENCE in seconds, else 300 s.
std::chrono::milliseconds stop_patience();

// How long a rank that leaves waits for the others to take what was sent to them.
inline constexpr std::chrono::milliseconds kLeavingTime{1000};

}  // namespace chorale::transport
