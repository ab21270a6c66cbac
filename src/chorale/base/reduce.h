// How values of several elements, or of several ranks, become one.
#pragma once

#include <cstdint>

namespace chorale {

enum class Reduce : uint8_t { kNone, kSum, kProduct, kMin, kMax, kAverage, kBitAnd, kBitOr, kBitXor };

}  // namespace chorale
