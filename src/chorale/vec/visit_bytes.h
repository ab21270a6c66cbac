// A type of the size of an element, for moving elements without a look inside.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chorale/base/dtype.h"
#include "chorale/base/error.h"

namespace chorale::vec {

struct Bytes16 {
  uint64_t halves[2];
};

// Calls f(TypeTag<Unit>{}) with an unsigned type, or Bytes16, of `elem` bytes: 1, 2, 4, 8 or 16.
template <class F>
void visit_bytes(size_t elem, F&& f) {
  switch (elem) {
    case 1:
      return f(base::TypeTag<uint8_t>{});
    case 2:
      return f(base::TypeTag<uint16_t>{});
    case 4:
      return f(base::TypeTag<uint32_t>{});
    case 8:
      return f(base::TypeTag<uint64_t>{});
    case 16:
      return f(base::TypeTag<Bytes16>{});
    default:
      CHORALE_INVARIANT(false, "no element has ", elem, " bytes");
  }
}

}  // namespace chorale::vec
