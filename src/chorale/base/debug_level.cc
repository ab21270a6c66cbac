#include "chorale/base/debug_level.h"

#include <atomic>
#include <optional>
#include <string>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/printable.h"

namespace chorale {
namespace {

std::optional<DebugLevel> level_of(std::string_view name) {
  std::string upper;
  for (char c : name) upper += c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  for (DebugLevel level : {DebugLevel::kOff, DebugLevel::kInfo, DebugLevel::kDetail}) {
    if (upper == name_of(level)) return level;
  }
  return std::nullopt;
}

DebugLevel from_environment() {
  for (const char* name : {"CHORALE_DEBUG", "TORCH_DISTRIBUTED_DEBUG"}) {
    const auto text = config::env(name);
    if (!text) continue;
    const auto level = level_of(*text);
    CHORALE_CHECK(level, "[environment] ", name, " is '", printable(*text),
                  "'; it takes OFF, INFO or DETAIL. Correct it, or unset it");
    return *level;
  }
  return DebugLevel::kOff;
}
std::atomic<DebugLevel>& current() {
  static std::atomic<DebugLevel> level{from_environment()};
  return level;
}

}  // namespace

DebugLevel debug_level() { return current().load(std::memory_order_relaxed); }
void set_debug_level(DebugLevel level) { current().store(level, std::memory_order_relaxed); }

std::string_view name_of(DebugLevel level) {
  constexpr std::string_view kNames[] = {"OFF", "INFO", "DETAIL"};
  return kNames[static_cast<size_t>(level)];
}

DebugLevel debug_level_from_name(std::string_view name) {
  const auto level = level_of(name);
  CHORALE_CHECK(level, "[debug] '", name, "' is no debug level; choose OFF, INFO or DETAIL");
  return *level;
}

}  // namespace chorale
