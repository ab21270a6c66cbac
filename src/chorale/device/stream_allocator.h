// An allocator for devices whose work runs later than the calls that ask for it.
//
// Note [Memory in the order of streams]
// A block belongs to the stream that was current when it was allocated. The host frees it while work that uses it may
// still be on the stream. On that stream it can be handed out again at once: what its next owner does comes after that
// work. On another stream it can be handed out only after an event on the first one. A block that was used on further
// streams (record_stream) waits for events on those before it is free anywhere.
//
// Note [Memory of programs]
// What was recorded is run again at the addresses it was recorded with. So blocks that are allocated while a stream is
// recorded belong to the program: freed ones are handed out again within that recording, and to nobody else before the
// program is gone. Work may also hand over a block that it took before the recording began, and needs no more outside.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "chorale/device/allocator.h"
#include "chorale/device/stream.h"

namespace chorale {

// A stretch of addresses that grows at its end. Called under the allocator's lock.
class GrowingMemory {
 public:
  virtual ~GrowingMemory() = default;
  virtual std::byte* base() const = 0;
  // Makes the first `bytes` usable; throws StateError when there is no memory.
  virtual void grow(size_t bytes) = 0;
};

class StreamAllocator final : public Allocator {
 public:
  // Blocks are multiples of `unit` bytes.
  StreamAllocator(Device device, std::unique_ptr<GrowingMemory> memory, size_t unit);
  ~StreamAllocator() override;

  memory::Block allocate(size_t bytes) override;
  void deallocate(const memory::Block& block) noexcept override;
  MemoryStats stats() const override;
  void reset_peak() override;
  void trim() override {}
  void record_stream(const void* address, Stream stream) override;

  // Note [Memory of programs]. Between these two, blocks that `stream` allocates belong to the keeper that is returned.
  uint64_t begin_keeping(Stream stream);
  void end_keeping(Stream stream);
  // The live block at or around `address` becomes the keeper's; false where nothing keeps what `stream` allocates, or
  // where the block is another stream's.
  bool hand_over(const void* address, Stream stream);
  // The keeper is gone: its blocks are as any others once the work that is on its stream now has ended.
  void release_kept(uint64_t keeper) noexcept;

  // What the live block at or around `address` holds, for errors. label_of() is for handlers of signals: it gives up
  // where another thread holds the lock.
  void set_label(const void* address, std::string label);
  std::string label_of(const void* address) const;

  // Hands freed blocks to any stream at once, for a test that must see such an error found.
  void plant_early_reuse(bool planted) { early_reuse_ = planted; }

 private:
  struct Live {
    size_t bytes;
    Stream stream;
    uint64_t keeper;  // 0: none
    std::vector<Stream> others;
    std::string label;
  };
  struct Free {
    size_t bytes;
    Stream stream;
    uint64_t keeper;
    std::vector<std::shared_ptr<Event::State>> awaited;  // before anybody may have it, its own stream included
    std::shared_ptr<Event::State> released;              // on its own stream, once another one has asked for it
  };
  using FreeMap = std::map<std::byte*, Free>;

  void free(std::byte* data, Free run);
  FreeMap::iterator find_fit(size_t bytes, const Stream& stream, uint64_t keeper);
  bool is_free_for(Free& run, const Stream& stream);
  uint64_t keeper_of(const Stream& stream) const;

  const Device device_;
  const size_t unit_;
  const std::unique_ptr<GrowingMemory> memory_;
  bool early_reuse_ = false;
  mutable std::mutex mutex_;  // guards what follows
  size_t end_ = 0;            // of what was ever handed out
  std::map<std::byte*, Live> live_;
  FreeMap free_;
  std::vector<std::pair<Stream, uint64_t>> keeping_;
  uint64_t last_keeper_ = 0;
  MemoryStats stats_;
};

}  // namespace chorale
