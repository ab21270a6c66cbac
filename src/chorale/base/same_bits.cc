#include "chorale/base/same_bits.h"

#include <atomic>

#include "chorale/base/env_number.h"

namespace chorale {
namespace {

std::atomic<bool>& switched_on() {
  static std::atomic<bool> on = config::is_on("CHORALE_SAME_BITS", false);
  return on;
}

}  // namespace

bool same_bits() { return switched_on().load(std::memory_order_relaxed); }
void set_same_bits(bool on) { switched_on().store(on, std::memory_order_relaxed); }

}  // namespace chorale
