// Text that nobody vouches for, as it can be shown.
#pragma once

#include <string>
#include <string_view>

namespace chorale {

// Strict: no surrogates, nothing overlong.
bool is_utf8(std::string_view text);

// The text; where it is not UTF-8, every byte that is not plain ASCII as \xff.
std::string printable(std::string_view text);

}  // namespace chorale
