#pragma once

#include <cstddef>

namespace chorale {

// A tensor has at most so many dimensions.
inline constexpr size_t kMaxDims = 8;

}  // namespace chorale
