// Inside comm: which part of [0, elems) is a rank's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "chorale/transport/shm/group_segment.h"

namespace chorale::comm {

struct Slice {
  int64_t begin = 0, end = 0;
};

// Whole cache lines, so that no two ranks write to one.
inline Slice slice_of(int64_t elems, size_t elem_bytes, int rank, int size) {
  const auto line = static_cast<int64_t>(std::max<size_t>(transport::shm::kCacheLineBytes / elem_bytes, 1));
  const int64_t each = ((elems + size - 1) / size + line - 1) / line * line;
  return {std::min(elems, each * rank), std::min(elems, each * (rank + 1))};
}

}  // namespace chorale::comm
