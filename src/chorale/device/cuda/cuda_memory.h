// Memory of a GPU, and pinned memory of the host.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "chorale/device/runtime.h"
#include "chorale/device/stream_allocator.h"

namespace chorale::cuda {

// Addresses for all that a device has, behind which pages come as they are needed: freed neighbours join whatever calls
// they came from, and peers can map the pages.
std::unique_ptr<GrowingMemory> device_memory(Device device);

// Page-locked memory of the host, in blocks of powers of two that are kept. A block that copies use (record_stream) is
// handed out again when they have ended.
class PinnedAllocator final : public Allocator {
 public:
  memory::Block allocate(size_t bytes) override;
  void deallocate(const memory::Block& block) noexcept override;
  MemoryStats stats() const override;
  void reset_peak() override;
  void trim() override {}
  void record_stream(const void* address, Stream stream) override;
  bool holds(const void* address) const;

 private:
  struct Live {
    size_t bytes;
    std::vector<Stream> streams;
  };
  struct Free {
    std::byte* data;
    std::vector<std::shared_ptr<Event::State>> awaited;
  };
  mutable std::mutex mutex_;  // guards what follows
  std::map<const std::byte*, Live> live_;
  std::map<size_t, std::vector<Free>> free_;
  MemoryStats stats_;
};

}  // namespace chorale::cuda
