// The stacks of all threads of this process, for watchdogs and for errors about something that hangs.
#pragma once

#include <string>

namespace chorale {

// One paragraph per thread, innermost call first, with file and line where debug information has them. Interrupts each
// thread with a signal for a moment; a thread that does not answer within a second is reported without frames. Calls
// from several threads take turns. Not for signal handlers.
std::string stacks_of_all_threads();

}  // namespace chorale
