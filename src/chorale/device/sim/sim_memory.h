// Memory that only stream threads can touch: one file, mapped twice. Tensors carry addresses of the closed mapping,
// where every access by the host faults; a stream thread adds a constant and uses the open one.
#pragma once

#include <cstddef>

#include "chorale/device/stream_allocator.h"

namespace chorale::sim {

class SimMemory final : public GrowingMemory {
 public:
  // `bytes` of address space; pages take memory when they are first written. With `closed` false the host may use the
  // first mapping until close() (pinned memory).
  SimMemory(size_t bytes, bool closed);
  ~SimMemory() override;
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  std::byte* base() const override { return first_; }
  void grow(size_t bytes) override;

  bool holds(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    return at >= first_ && at < first_ + bytes_;
  }
  // The same byte where stream threads see it.
  void* open(const void* address) const { return second_ + (static_cast<const std::byte*>(address) - first_); }

  // Takes the pages around [address, address + bytes) from the host, and gives them back. They nest.
  void close(const void* address, size_t bytes);
  void reopen(const void* address, size_t bytes);

 private:
  void protect(const void* address, size_t bytes, int by);

  size_t bytes_;
  std::byte *first_, *second_;
  std::mutex mutex_;
  std::map<size_t, int> closed_;  // page → how often
};

}  // namespace chorale::sim
