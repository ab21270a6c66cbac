#include "chorale/kernel/kernel_maker.h"

#include <array>
#include <atomic>

namespace chorale::kernel {
namespace {

std::array<std::atomic<KernelMaker*>, kDeviceTypes> makers{};

}  // namespace

KernelMaker* find_kernel_maker(DeviceType type) {
  return makers[static_cast<size_t>(type)].load(std::memory_order_acquire);
}
void set_kernel_maker(DeviceType type, KernelMaker* maker) {
  makers[static_cast<size_t>(type)].store(maker, std::memory_order_release);
}

}  // namespace chorale::kernel
