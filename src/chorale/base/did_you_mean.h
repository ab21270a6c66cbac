// Suggestions in messages about a word that is not known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace chorale {

// "; did you mean 'NAME'?" with the known name nearest to `word`, or nothing when none is near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& names);

}  // namespace chorale
