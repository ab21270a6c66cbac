#include "chorale/transport/keep_alive.h"

#include <cstdlib>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::transport {

using namespace std::chrono_literals;

std::chrono::milliseconds keep_alive() {
  const auto text = config::env("CHORALE_KEEP_ALIVE");
  if (!text) return 10s;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  CHORALE_CHECK(*end == 0 && seconds >= 0.05 && seconds < 1e6, "[group] CHORALE_KEEP_ALIVE is '", *text,
                "'; it takes a number of seconds, at least 0.05, such as 10");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

std::chrono::milliseconds stop_patience() {
  const auto text = config::env("CHORALE_STOP_PATIENCE");
  if (!text) return 300s;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  CHORALE_CHECK(*end == 0 && seconds > 0 && seconds < 1e9, "[group] CHORALE_STOP_PATIENCE is '", *text,
                "'; it takes a number of seconds, such as 300");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

}  // namespace chorale::transport
