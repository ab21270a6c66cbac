// Checks of options that several optimizers share.
#pragma once

#include "chorale/base/error.h"

namespace chorale::optim {

inline void check_not_negative(const char* optimizer, const char* option, double value) {
  CHORALE_CHECK(value >= 0, "[", optimizer, "] ", option, " must be at least 0, not ", value);
}
inline void check_decay(const char* optimizer, const char* option, double value) {
  CHORALE_CHECK(value >= 0 && value < 1, "[", optimizer, "] ", option, " must be in [0, 1), not ", value);
}

}  // namespace chorale::optim
