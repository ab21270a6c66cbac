// A backward that nobody waits for.
#pragma once

#include "chorale/autograd/backward.h"

namespace chorale::autograd {

// As run.run(), but does not wait for late roots (Note [Late roots]): false while some are still expected. To be called
// again when one has come, by any one thread at a time.
bool advance(BackwardRun& run);

}  // namespace chorale::autograd
