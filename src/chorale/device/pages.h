// Bookkeeping of the allocator: which arena an address lies in, which pages are free, and which belong to one block.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "chorale/device/allocator.h"

namespace chorale {

// Address → arena: two levels over the 22 bits above kArenaBytes of a 48-bit address. Readers take no lock, so an Arena
// that was ever set must stay where it is.
class ArenaMap {
 public:
  ArenaMap() = default;
  ArenaMap(const ArenaMap&) = delete;
  ArenaMap& operator=(const ArenaMap&) = delete;
  ~ArenaMap() {
    for (auto& leaf : leaves_) delete leaf.load();
  }

  void set(const memory::Arena& arena) { set(arena, &arena); }
  void forget(const memory::Arena& arena) { set(arena, nullptr); }
  const memory::Arena* find(const void* address) const {
    const uint64_t number = reinterpret_cast<uint64_t>(address) / memory::kArenaBytes;
    if (number >= kLeaves * kLeafEntries) return nullptr;
    const Leaf* leaf = leaves_[number / kLeafEntries].load(std::memory_order_acquire);
    return leaf ? (*leaf)[number % kLeafEntries].load(std::memory_order_acquire) : nullptr;
  }

 private:
  static constexpr uint64_t kLeaves = 2048, kLeafEntries = 2048;
  static_assert(kLeaves * kLeafEntries * memory::kArenaBytes == uint64_t{1} << 48);
  using Leaf = std::array<std::atomic<const memory::Arena*>, kLeafEntries>;

  void set(const memory::Arena& arena, const memory::Arena* entry) {
    for (size_t at = 0; at < arena.bytes; at += memory::kArenaBytes) {
      const uint64_t number = reinterpret_cast<uint64_t>(arena.base + at) / memory::kArenaBytes;
      std::atomic<Leaf*>& slot = leaves_[number / kLeafEntries];
      if (!slot.load()) slot.store(new Leaf{});
      (*slot.load())[number % kLeafEntries].store(entry, std::memory_order_release);
    }
  }

  std::array<std::atomic<Leaf*>, kLeaves> leaves_{};
};

// Free runs of pages, by address (to merge) and by size (to find the best fit). Runs never merge across arenas, because
// each arena is released by itself.
class PageRuns {
 public:
  explicit PageRuns(const ArenaMap& map) : map_(map) {}

  std::byte* take(size_t bytes) {
    const auto found = by_size_.lower_bound({bytes, nullptr});
    if (found == by_size_.end()) return nullptr;
    const auto [run_bytes, base] = *found;
    remove(base, run_bytes);
    if (run_bytes > bytes) add(base + bytes, run_bytes - bytes);
    return base;
  }
  void give(std::byte* base, size_t bytes) {
    const auto next = by_address_.lower_bound(base);
    const auto after = next == by_address_.end() ? Run{} : Run{next->first, next->second};
    const auto before = next == by_address_.begin() ? Run{} : Run{std::prev(next)->first, std::prev(next)->second};
    if (before.base && before.base + before.bytes == base && map_.find(before.base) == map_.find(base)) {
      remove(before.base, before.bytes);
      base = before.base;
      bytes += before.bytes;
    }
    if (after.base && base + bytes == after.base && map_.find(after.base) == map_.find(base)) {
      remove(after.base, after.bytes);
      bytes += after.bytes;
    }
    add(base, bytes);
  }
  // True, and the run is gone, when all of the arena is free.
  bool take_whole(const memory::Arena& arena) {
    const auto found = by_address_.find(arena.base);
    if (found == by_address_.end() || found->second != arena.bytes) return false;
    remove(arena.base, arena.bytes);
    return true;
  }

 private:
  struct Run {
    std::byte* base = nullptr;
    size_t bytes = 0;
  };
  void add(std::byte* base, size_t bytes) {
    by_address_.emplace(base, bytes);
    by_size_.emplace(bytes, base);
  }
  void remove(std::byte* base, size_t bytes) {
    by_address_.erase(base);
    by_size_.erase({bytes, base});
  }

  const ArenaMap& map_;
  std::map<std::byte*, size_t> by_address_;
  std::set<std::pair<size_t, std::byte*>> by_size_;
};

// Given a stretch of one block of an allocator: whether nothing but this block lies in the pages that the stretch
// touches, so that they can be replaced under a peer that must not write there any more (Note [Block sizes] in
// allocator.h).
bool owns_pages(const std::byte* begin, size_t bytes);

}  // namespace chorale
