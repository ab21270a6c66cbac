// What ranks that compile together tell each other, on a group that is used for nothing else.
#pragma once

#include <optional>
#include <string>

#include "chorale/comm/group.h"

namespace chorale::compiled {

// Where two texts differ first: the number of the line, from 1, and what stands there in each.
struct Difference {
  size_t line = 0;
  std::string first, second;
};
std::optional<Difference> first_difference(const std::string& first, const std::string& second);

// Every rank calls it with the text of what it compiled. Throws StateError on all of them where texts differ, naming
// the first node that does: such graphs would wait for each other for ever, or sum what does not belong together. The
// rank's own number inside of a collective is no difference.
void check_agreement(const comm::Group& group, const std::string& text);

// Whether all ranks found a graph that fits; every rank calls it.
bool all_have_one(const comm::Group& group, bool has_one);

}  // namespace chorale::compiled
