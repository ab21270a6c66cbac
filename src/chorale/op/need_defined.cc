#include "chorale/op/need_defined.h"

#include "chorale/base/error.h"

namespace chorale::op {

void raise_undefined_argument(const char* function, const char* argument) {
  throw InvalidArgument(concat("[", function, "] ", argument,
                               " is an undefined tensor: default-constructed, moved from, or a result that is absent"));
}

}  // namespace chorale::op
