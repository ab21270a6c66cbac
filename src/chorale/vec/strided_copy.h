// Copies between any layouts and dtypes, and fills.
#pragma once

#include "chorale/vec/strided.h"

namespace chorale::vec {

// kOne for callers on threads of their own, where a team of OpenMP's would take the cores from those that compute.
enum class Threads : uint8_t { kAll, kOne };

// Overwrites `to` with the values of `from`, converted. Sizes are equal; the memory must not overlap. Where dtypes are
// equal it need not be aligned.
void copy_strided(const StridedView& from, const StridedView& to, Threads threads = Threads::kAll);
// Overwrites every element with *value, which has the dtype of `to`.
void fill_strided(const void* value, const StridedView& to, Threads threads = Threads::kAll);

}  // namespace chorale::vec
