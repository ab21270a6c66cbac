// With which status the process ends.
#pragma once

namespace chorale {

// The process has failed, though nobody may ask: where it would have ended with status 0 it ends with 1. Not where it
// ends by _exit or a signal.
void end_with_failure();

}  // namespace chorale
