#include "chorale/kernel/element_loop.h"

#include <array>
#include <atomic>

namespace chorale::kernel {
namespace {

std::array<std::atomic<ElementLoops*>, kDeviceTypes> all_element_loops{};

}  // namespace

ElementLoops* find_element_loops(DeviceType type) {
  return all_element_loops[static_cast<size_t>(type)].load(std::memory_order_acquire);
}
void set_element_loops(DeviceType type, ElementLoops* loops) {
  all_element_loops[static_cast<size_t>(type)].store(loops, std::memory_order_release);
}

}  // namespace chorale::kernel
