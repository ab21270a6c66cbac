// Parts that a machine may or may not have: one row each, asked here instead of with #ifdef.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace chorale {

struct Availability {
  bool yes = false;
  std::string reason;  // when not: what is missing, and what to install
};

struct OptionalPart {
  std::string_view name;
  std::string_view gives;  // what a user gains by it
  Availability (*available)();
};
std::span<const OptionalPart> optional_parts();

// Whether the dynamic linker finds the library `soname`; the reason otherwise, ending in what to install.
Availability has_library(const char* soname, std::string_view to_install);

}  // namespace chorale
