// The stacks of all threads of this process, for watchdogs and for errors about something that hangs.
#pragma once

#include <string>

namespace chorale {

// One paragraph per thread, innermost call first, with file and line where debug information has them. Interrupts each
// thread with a signal for a moment; a thread that does not answer within a second is reported without frames. Calls
// from several threads take turns. Not for signal handlers.
std::string stacks_of_all_threads();

// Where code that is not of this library called it, in this thread: "train.cc:42", or the name of the function where
// there is no debug information. Tests count as such code. Empty where nothing is known. Takes a moment: for errors
// only.
std::string line_of_caller();

}  // namespace chorale
