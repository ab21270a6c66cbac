// Memory of a device that the ranks of one host read from each other, and sums over it. A kind of device that has this
// adds it beside its runtime.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "chorale/base/dtype.h"
#include "chorale/device/device.h"

namespace chorale {

// Names such memory to another process; copied there as bytes.
struct PeerHandle {
  uint64_t process = 0;  // a number that each process draws
  uint64_t address = 0;  // in that process
  uint64_t bytes = 0;
  std::array<std::byte, 64> handle{};  // the driver's
};

// Thread-safe.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Equal for two processes exactly where they use the same device.
  virtual std::array<std::byte, 16> identity(Device device) = 0;
  // Lives as long as the process.
  virtual PeerHandle make(Device device, size_t bytes) = 0;
  // Where this process sees memory of another one, or its own. It may be read, not written.
  virtual const void* open(Device device, const PeerHandle& handle) = 0;
  // out[i] = the sum of factor * sources[r][i] over r, divided by `divisor`, with the bits of vec::combine (Note [Order
  // of sums]). Floating dtypes; at most kMostSources; `out` is none of the sources.
  virtual void sum(std::span<const void* const> sources, DType dtype, double factor, double divisor, void* out,
                   int64_t elems, Stream stream) = 0;
  static constexpr size_t kMostSources = 64;
};

// Null where a kind of device has none.
PeerMemory* find_peer_memory(DeviceType type);
// It lives as long as the process. A later call replaces it; nothing is taken away (tests).
void set_peer_memory(DeviceType type, PeerMemory* memory);

}  // namespace chorale
