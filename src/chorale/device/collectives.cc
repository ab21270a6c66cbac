#include "chorale/device/collectives.h"

#include <atomic>

namespace chorale {
namespace {

std::array<std::atomic<DeviceCollectives*>, kDeviceTypes> all_collectives{};

}  // namespace

DeviceCollectives* find_collectives(DeviceType type) {
  return all_collectives[static_cast<size_t>(type)].load(std::memory_order_acquire);
}
void set_collectives(DeviceType type, DeviceCollectives* collectives) {
  all_collectives[static_cast<size_t>(type)].store(collectives, std::memory_order_release);
}

}  // namespace chorale
