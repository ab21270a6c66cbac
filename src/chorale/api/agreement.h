// What ranks that compile together tell each other, on a group that is used for nothing else.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chorale/api/segment.h"
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
// rank's own number inside of a collective is no difference, nor are sizes where they may differ.
void check_agreement(const comm::Group& group, const std::string& text, bool sizes_may_differ = false);

// The texts of all ranks; every rank calls it.
std::vector<std::string> gather_texts(const comm::Group& group, const std::string& own);

// A backend that asks the other ranks what their programs were made by. Where that is not the same (a rank has another
// compiler or processor, or its compiler failed), all of them run the graph op by op, so that replicas stay equal bit
// for bit, and a line of the log says so.
Backend agreeing(Backend backend, const comm::Group& group);

// Whether all ranks found a graph that fits; every rank calls it.
bool all_have_one(const comm::Group& group, bool has_one);

}  // namespace chorale::compiled
