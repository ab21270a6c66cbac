#include "chorale/base/did_you_mean.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace chorale {
namespace {

// Insertions, deletions and replacements of a letter that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);  // distances from the part of a read so far to each prefix of b
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names) {
  std::string nearest;
  size_t nearest_distance = std::max<size_t>(2, word.size() / 2) + 1;
  for (const std::string& name : names) {
    if (const size_t distance = edit_distance(word, name); distance < nearest_distance) {
      nearest = name;
      nearest_distance = distance;
    }
  }
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

}  // namespace chorale
