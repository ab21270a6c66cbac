// Collectives between ranks that each have a device of their own, by the device's own library (NCCL on NVIDIA's GPUs).
// A kind of device that has this adds it beside its runtime.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "chorale/base/dtype.h"
#include "chorale/base/reduce.h"
#include "chorale/device/device.h"

namespace chorale {

// Memory of the device, in row-major order.
struct DeviceChunk {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// What a reduction makes of the chunks of all ranks.
struct DeviceReduction {
  DType dtype = DType::kF32;
  Reduce op = Reduce::kSum;
  double factor = 1;  // of a sum: each value is multiplied by it first
};

// One rank's end of a communicator. Nothing here waits for another rank. Calls are made one at a time, in the same
// order on all ranks, each when settled() has said yes; a call runs when its stream comes to it. abort() may be called
// at any time, by any thread.
class DeviceComm {
 public:
  // Ends it: in peace with the others if they come soon, else without them.
  virtual ~DeviceComm() = default;
  // Whether what was begun last, initialisation or a call, is behind: true, and another may be made. Throws StateError
  // when the library reports a failure, also one of calls that run.
  virtual bool settled() = 0;
  // Ends all that runs, wherever it hangs. Every later call throws StateError.
  virtual void abort() noexcept = 0;

  virtual void all_reduce(DeviceChunk in, DeviceChunk out, const DeviceReduction& how, Stream stream) = 0;
  // `out` is the root's.
  virtual void reduce(DeviceChunk in, DeviceChunk out, int root, const DeviceReduction& how, Stream stream) = 0;
  // One chunk for each rank, of sizes that may differ; rank r gets what is made of all r-th chunks.
  virtual void reduce_scatter(std::span<const DeviceChunk> in, DeviceChunk out, const DeviceReduction& how,
                              Stream stream) = 0;
  virtual void broadcast(DeviceChunk data, int root, Stream stream) = 0;
  // out[r] gets rank r's chunk.
  virtual void all_gather(DeviceChunk in, std::span<const DeviceChunk> out, Stream stream) = 0;
  // give[r] goes to rank r, take[r] comes from it; nothing where it is empty. Both sides agree on the sizes.
  virtual void exchange(std::span<const DeviceChunk> give, std::span<const DeviceChunk> take, Stream stream) = 0;
};

// Thread-safe.
class DeviceCollectives {
 public:
  // The name by which the ranks of a communicator find each other.
  using Id = std::array<std::byte, 128>;

  virtual ~DeviceCollectives() = default;
  // Empty where it can be used; else what is missing, and what to install.
  virtual std::string why_not() = 0;
  // Equal for two processes exactly where they use the same device.
  virtual std::array<std::byte, 16> identity(Device device) = 0;
  virtual bool can(const DeviceReduction& how) = 0;
  // One rank calls it, for all of them.
  virtual Id make_id() = 0;
  // Begins to meet the others, and returns.
  virtual std::unique_ptr<DeviceComm> begin(const Id& id, Device device, int rank, int size) = 0;
};

// Null where a kind of device has none.
DeviceCollectives* find_collectives(DeviceType type);
// It lives as long as the process. A later call replaces it; nothing is taken away (tests).
void set_collectives(DeviceType type, DeviceCollectives* collectives);

}  // namespace chorale
