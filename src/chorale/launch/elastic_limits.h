// How many ranks a job may have that goes on when some of them die.
#pragma once

#include <string>

namespace chorale::launch {

// What --elastic MIN:MAX says.
struct ElasticLimits {
  int least = 1, most = 1;
  // InvalidArgument for anything else.
  static ElasticLimits parse(const std::string& text);
};

}  // namespace chorale::launch
