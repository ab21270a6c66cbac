#include "chorale/device/peers.h"

#include <atomic>

namespace chorale {
namespace {

std::array<std::atomic<PeerMemory*>, kDeviceTypes> peer_memories{};

}  // namespace

PeerMemory* find_peer_memory(DeviceType type) {
  return peer_memories[static_cast<size_t>(type)].load(std::memory_order_acquire);
}
void set_peer_memory(DeviceType type, PeerMemory* memory) {
  peer_memories[static_cast<size_t>(type)].store(memory, std::memory_order_release);
}

}  // namespace chorale
