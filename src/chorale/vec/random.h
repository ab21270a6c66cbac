// Random words by the vector: a counter-based generator computes any stretch of a stream on its own.
#pragma once

#include <cstdint>

#include "chorale/base/philox.h"

namespace chorale::vec {

// out[i] = random_word(stream, first + i) for i in [0, n).
void random_words(RandomStream stream, uint64_t first, uint32_t* out, int64_t n);

}  // namespace chorale::vec
