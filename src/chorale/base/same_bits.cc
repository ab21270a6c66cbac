#include "chorale/base/same_bits.h"

#include <atomic>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale {
namespace {

bool wanted_at_start() {
  const auto text = config::env("CHORALE_SAME_BITS");
  CHORALE_CHECK(!text || *text == "0" || *text == "1", "[same_bits] CHORALE_SAME_BITS is '", *text, "'; it is 0 or 1");
  return text && *text == "1";
}
std::atomic<bool>& switched_on() {
  static std::atomic<bool> on = wanted_at_start();
  return on;
}

}  // namespace

bool same_bits() { return switched_on().load(std::memory_order_relaxed); }
void set_same_bits(bool on) { switched_on().store(on, std::memory_order_relaxed); }

}  // namespace chorale
