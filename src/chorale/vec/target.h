// Which instruction set the vector loops use: the best that was compiled in and that the CPU has.
#pragma once

#include <vector>

namespace chorale::vec {

// "AVX3" (AVX-512), "AVX2", "SSE4".
const char* target_name();

// Best first.
std::vector<const char*> available_targets();

// Tests call it: makes the loops use this target until called with nullptr. Throws InvalidArgument for a name that is
// not available. Not thread-safe: no loop may be looked up at the same time.
void force_target(const char* name);

}  // namespace chorale::vec
