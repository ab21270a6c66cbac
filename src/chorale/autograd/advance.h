// A backward that nobody waits for.
#pragma once

#include "chorale/autograd/backward.h"

namespace chorale::autograd {

// Does what run.run() does, but does not wait for late roots (Note [Late roots]): false while some are still expected.
// It is called again when one has come, by any one thread at a time.
bool advance(BackwardRun& run);

}  // namespace chorale::autograd
