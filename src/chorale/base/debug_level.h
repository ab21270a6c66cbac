// How much a program checks and says beyond what it always does.
#pragma once

#include <cstdint>
#include <string_view>

namespace chorale {

// kInfo names parameters in errors of data-parallel training; kDetail also puts a monitored barrier before every
// collective, so that a rank that stays away is named by rank 0.
enum class DebugLevel : uint8_t { kOff, kInfo, kDetail };

// Process-wide. Read from CHORALE_DEBUG, else TORCH_DISTRIBUTED_DEBUG, at first use: OFF, INFO or DETAIL in any case.
DebugLevel debug_level();
void set_debug_level(DebugLevel level);
std::string_view name_of(DebugLevel level);
// Throws InvalidArgument for an unknown name.
DebugLevel debug_level_from_name(std::string_view name);

}  // namespace chorale
