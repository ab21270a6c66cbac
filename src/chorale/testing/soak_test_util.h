// Long forms of tests (docs/dev/testing.md). CHORALE_SOAK=1 asks for all of them; a larger number for as many seeds.
#pragma once

#include <algorithm>
#include <string>

#include "chorale/base/config.h"

namespace chorale {

inline bool soaking() { return config::env("CHORALE_SOAK").has_value(); }

// The number of seeds that a test tries: `few`, or of `all` those that were asked for.
inline int seeds_to_try(int few, int all) {
  const auto asked = config::env("CHORALE_SOAK");
  if (!asked) return few;
  const int most = std::stoi(*asked);
  return most > 1 ? std::min(most, all) : all;
}

}  // namespace chorale
