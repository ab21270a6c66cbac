// Letters for sharding rules that depend on attributes and ranks (ShardRule in op_def.h).
#pragma once

#include <cctype>
#include <cstdint>
#include <string>

namespace chorale::op {

// One letter per dimension: abc for dims 3.
inline std::string letters(int64_t dims, char first = 'a') {
  std::string labels;
  for (int64_t i = 0; i < dims; ++i) labels += static_cast<char>(first + i);
  return labels;
}

// A dimension that must stay whole: its letter as a capital. `dim` may be negative.
inline std::string keep_whole(std::string labels, int64_t dim) {
  char& letter = labels[static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(labels.size()) : dim)];
  letter = static_cast<char>(std::toupper(letter));
  return labels;
}

}  // namespace chorale::op
