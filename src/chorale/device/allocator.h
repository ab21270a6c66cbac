// Memory for tensors. An Allocator hands out blocks aligned to 64 bytes and keeps freed ones for the next call. It
// takes address space in arenas from an ArenaSource that can be exchanged: private pages by default, memory that other
// processes can map (memfd) in a job of several ranks.
//
// Note [Block sizes]
// Blocks of up to kLargestSmallBytes belong to a size class; every thread keeps its own free list per class, and a
// block freed by another thread goes back to its owner's list. Larger blocks own whole pages and come from one ordered
// map of free page runs that merges neighbours. Pages of their own matter beyond speed: peers may reduce such a block
// in place, and the pages can be replaced under a peer that must not write any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "chorale/device/device.h"

namespace chorale {

namespace memory {

inline constexpr size_t kBlockAlignment = 64;
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kArenaBytes = size_t{64} << 20;  // arenas are multiples of this, and aligned to it
inline constexpr size_t kLargestSmallBytes = size_t{256} << 10;

struct ThreadCache;
struct AllocatorState;

// A stretch of address space that a source gave us. `source_offset` is its place in what the source shares with others.
struct Arena {
  std::byte* base = nullptr;
  size_t bytes = 0;
  uint64_t source_offset = 0;
};

// What allocate() returned; deallocate() wants it back whole.
struct Block {
  std::byte* data = nullptr;
  size_t bytes = 0;              // as rounded up; the caller may use what it asked for
  ThreadCache* owner = nullptr;  // null for large blocks
};

// Where an address lies.
struct Location {
  Arena arena;
  size_t offset = 0;
  uint64_t source_offset() const { return arena.source_offset + offset; }
};

// Gives and takes back arenas. Called under the allocator's lock.
class ArenaSource {
 public:
  virtual ~ArenaSource() = default;
  // `bytes` is a multiple of kArenaBytes; base must be aligned to kArenaBytes. Throws StateError when there is no
  // memory.
  virtual Arena acquire(size_t bytes) = 0;
  virtual void release(const Arena& arena) noexcept = 0;
  // The descriptor that peers map, or -1 when the memory is private.
  virtual int shared_descriptor() const { return -1; }
};

}  // namespace memory

std::unique_ptr<memory::ArenaSource> private_pages();
// One sparse memfd for the whole process: it has no name, so nothing is left behind when the process dies.
std::unique_ptr<memory::ArenaSource> shared_pages();

struct MemoryStats {
  size_t current_bytes = 0;   // in live blocks, as rounded up
  size_t peak_bytes = 0;      // the largest value of current_bytes since the last reset
  size_t reserved_bytes = 0;  // address space taken from the source
};

// Thread-safe.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // Throws InvalidArgument for an absurd size and StateError when memory is exhausted. Zero bytes give a null block.
  virtual memory::Block allocate(size_t bytes) = 0;
  virtual void deallocate(const memory::Block& block) noexcept = 0;
  virtual MemoryStats stats() const = 0;
  virtual void reset_peak() = 0;
  // Gives arenas without live blocks back to the source, except those with blocks in the free lists of other running
  // threads.
  virtual void trim() = 0;
  // The live block at `address` is used on this stream, too: it is not handed out again before what is on the stream
  // when it is freed has ended. For devices without streams of their own there is nothing to remember.
  virtual void record_stream(const void* /*address*/, Stream /*stream*/) {}
};

class CachingAllocator final : public Allocator {
 public:
  explicit CachingAllocator(std::unique_ptr<memory::ArenaSource> source);
  ~CachingAllocator() override;

  memory::Block allocate(size_t bytes) override;
  void deallocate(const memory::Block& block) noexcept override;
  MemoryStats stats() const override;
  void reset_peak() override;
  void trim() override;

  // Takes constant time and no locks; returns nothing for memory that is not ours.
  std::optional<memory::Location> locate(const void* address) const;
  memory::ArenaSource& source();
  // Throws StateError once an arena exists: memory cannot move under tensors.
  void set_source(std::unique_ptr<memory::ArenaSource> source);

 private:
  std::shared_ptr<memory::AllocatorState> state_;  // shared with the threads that have caches in it
};

// The process's allocator of the CPU. Its source is shared_pages() when the environment says that this process is one
// of several ranks, else private_pages().
CachingAllocator& cpu_allocator();
// The allocator behind a device; throws InvalidArgument for one that has none (null) or is not compiled in.
Allocator& allocator_of(Device device);

}  // namespace chorale
