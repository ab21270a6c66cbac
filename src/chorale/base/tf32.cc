#include "chorale/base/tf32.h"

#include <atomic>

#include "chorale/base/env_number.h"

namespace chorale {
namespace {

std::atomic<bool>& tf32_switch() {
  static std::atomic<bool> on = config::is_on("CHORALE_TF32", false);
  return on;
}

}  // namespace

bool tf32() { return tf32_switch().load(std::memory_order_relaxed); }
void set_tf32(bool on) { tf32_switch().store(on, std::memory_order_relaxed); }

}  // namespace chorale
