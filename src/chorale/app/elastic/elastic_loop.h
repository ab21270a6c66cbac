// The steps of `chorale train --elastic`.
#pragma once

#include "chorale/train/step_loop.h"

namespace chorale::app {

// The loop of a rank that `chorale train --elastic` started.
std::unique_ptr<train::StepLoop> elastic_loop();

}  // namespace chorale::app
