// Whole numbers and switches from the environment.
#pragma once

#include <cstdint>
#include <optional>

namespace chorale::config {

// The ranks of a job, over all its nodes.
inline constexpr int64_t kMostWorldSize = 1'000'000;

// What the variable says; nothing where it is not set or empty. InvalidArgument names the variable, its value and the
// range when it is anything but a whole number from `least` to `most`.
std::optional<int64_t> whole_number(const char* variable, int64_t least, int64_t most);

// A variable that is 0 or 1; `otherwise` where it is not set or empty. InvalidArgument names the variable and its value
// when it is anything else.
bool is_on(const char* variable, bool otherwise);

}  // namespace chorale::config
