// The status that the process ends with.
#pragma once

namespace chorale {

// Notes that the process has failed, though nobody may ask: where it would have ended with status 0, it ends with 1.
// This does not hold where it ends by _exit or a signal.
void end_with_failure();

}  // namespace chorale
