#include "chorale/base/did_you_mean.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace chorale {
namespace {

// Insertions, deletions and replacements of a letter, and exchanges of two neighbours, that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b) {
  // Distances from the part of a read so far to each prefix of b, and those of one and two letters before.
  std::vector<size_t> now(b.size() + 1), before(now), two_before(now);
  std::iota(now.begin(), now.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    std::swap(two_before, before);
    std::swap(before, now);
    now[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      now[j + 1] = std::min({before[j] + (a[i] == b[j] ? 0 : 1), now[j] + 1, before[j + 1] + 1});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j])
        now[j + 1] = std::min(now[j + 1], two_before[j - 1] + 1);
    }
  }
  return now.back();
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
