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

std::string_view without_dashes(std::string_view word) {
  return word.substr(std::min(word.find_first_not_of('-'), word.size()));
}

// "lr" for "learning-rate", "lernrate".
bool abbreviates(std::string_view name, std::string_view word) {
  if (name.size() > 3 || name.empty() || word.empty() || name[0] != word[0]) return false;
  for (const char letter : name) {
    const size_t at = word.find(letter);
    if (at == std::string_view::npos) return false;
    word.remove_prefix(at + 1);
  }
  return true;
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names) {
  const std::string_view letters = without_dashes(word);
  std::string nearest;
  size_t nearest_distance = std::max<size_t>(2, letters.size() / 3) + 1;
  for (const std::string& name : names) {
    const std::string_view other = without_dashes(name);
    const size_t distance = edit_distance(letters, other);
    if (distance < nearest_distance && distance < std::max(letters.size(), other.size())) {  // something in common
      nearest = name;
      nearest_distance = distance;
    }
  }
  if (nearest.empty()) {
    const auto short_form = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
      return abbreviates(without_dashes(name), letters);
    });
    if (short_form != names.end()) nearest = *short_form;
  }
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

}  // namespace chorale
