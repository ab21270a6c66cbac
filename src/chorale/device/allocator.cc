#include "chorale/device/allocator.h"

#include <sanitizer/asan_interface.h>

#include <array>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale {
namespace {

// Classes: multiples of 64 up to 512 bytes, then four per doubling (at most a quarter is lost to rounding).
constexpr int kFineClasses = 8;
constexpr int kClasses = kFineClasses + 4 * (18 - 9);  // up to 2^18 = kLargestSmallBytes
constexpr size_t kSpanBytes = size_t{64} << 10;        // what a thread takes at once for one class

constexpr int class_of(size_t bytes) {
  if (bytes <= 512) return static_cast<int>((bytes + 63) / 64) - 1;
  const int log = 63 - std::countl_zero(bytes - 1);  // 2^log < bytes <= 2^(log+1)
  const auto quarter = static_cast<int>(((bytes - 1) >> (log - 2)) & 3);
  return kFineClasses + (log - 9) * 4 + quarter;
}
constexpr size_t class_bytes(int size_class) {
  if (size_class < kFineClasses) return static_cast<size_t>(size_class + 1) * 64;
  const int log = 9 + (size_class - kFineClasses) / 4;
  return (size_t{1} << log) + (size_t{1} << (log - 2)) * static_cast<size_t>((size_class - kFineClasses) % 4 + 1);
}
static_assert(class_of(kLargestSmallBytes) == kClasses - 1 && class_bytes(kClasses - 1) == kLargestSmallBytes);
static_assert(class_bytes(class_of(513)) == 640 && class_bytes(class_of(640)) == 640 && class_of(1) == 0);

struct FreeLink {
  FreeLink* next;
  int size_class;
};

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Address → arena: two levels over the 22 bits above kArenaBytes of a 48-bit address. Readers take no lock.
class ArenaMap {
 public:
  ~ArenaMap() {
    for (auto& leaf : leaves_) delete leaf.load();
  }
  void set(const Arena& arena, const Arena* entry) {
    for (size_t at = 0; at < arena.bytes; at += kArenaBytes) {
      const uint64_t number = reinterpret_cast<uint64_t>(arena.base + at) / kArenaBytes;
      std::atomic<Leaf*>& slot = leaves_[number >> 11 & 2047];
      if (!slot.load()) slot.store(new Leaf{});
      (*slot.load())[number & 2047].store(entry, std::memory_order_release);
    }
  }
  const Arena* find(const void* address) const {
    const uint64_t number = reinterpret_cast<uint64_t>(address) / kArenaBytes;
    if (number >> 22) return nullptr;
    const Leaf* leaf = leaves_[number >> 11].load(std::memory_order_acquire);
    return leaf ? (*leaf)[number & 2047].load(std::memory_order_acquire) : nullptr;
  }

 private:
  using Leaf = std::array<std::atomic<const Arena*>, 2048>;
  std::array<std::atomic<Leaf*>, 2048> leaves_{};
};

// Free runs of pages, by address (to merge) and by size (to find the best fit).
class PageRuns {
 public:
  std::byte* take(size_t bytes) {
    const auto found = by_size_.lower_bound({bytes, nullptr});
    if (found == by_size_.end()) return nullptr;
    const auto [run_bytes, base] = *found;
    by_size_.erase(found);
    by_address_.erase(base);
    if (run_bytes > bytes) add(base + bytes, run_bytes - bytes);
    return base;
  }
  void give(std::byte* base, size_t bytes) {
    auto next = by_address_.lower_bound(base);
    // Runs never merge across arenas: each arena is released by itself.
    const auto joins = [](std::byte* end, std::byte* start) {
      return end == start && reinterpret_cast<uintptr_t>(start) % kArenaBytes != 0;
    };
    if (next != by_address_.begin()) {
      auto previous = std::prev(next);
      if (joins(previous->first + previous->second, base)) {
        base = previous->first;
        bytes += previous->second;
        by_size_.erase({previous->second, previous->first});
        by_address_.erase(previous);
      }
    }
    if (next != by_address_.end() && joins(base + bytes, next->first)) {
      bytes += next->second;
      by_size_.erase({next->second, next->first});
      by_address_.erase(next);
    }
    add(base, bytes);
  }
  bool take_exactly(const Arena& arena) {
    const auto found = by_address_.find(arena.base);
    if (found == by_address_.end() || found->second != arena.bytes) return false;
    by_size_.erase({arena.bytes, arena.base});
    by_address_.erase(found);
    return true;
  }

 private:
  void add(std::byte* base, size_t bytes) {
    by_address_.emplace(base, bytes);
    by_size_.emplace(bytes, base);
  }
  std::map<std::byte*, size_t> by_address_;
  std::set<std::pair<size_t, std::byte*>> by_size_;
};

std::atomic<uint64_t> next_id{1};

}  // namespace

// Free lists of one thread. Only its thread touches it, but for `remote`, where other threads push.
struct ThreadCache {
  std::array<FreeLink*, kClasses> free{};
  struct Span {
    std::byte* next = nullptr;
    std::byte* end = nullptr;
  };
  std::array<Span, kClasses> spans{};
  std::atomic<FreeLink*> remote{nullptr};

  void collect_remote() {
    FreeLink* link = remote.exchange(nullptr, std::memory_order_acquire);
    while (link) {
      FreeLink* next = link->next;
      link->next = free[static_cast<size_t>(link->size_class)];
      free[static_cast<size_t>(link->size_class)] = link;
      link = next;
    }
  }
};

struct AllocatorState {
  const uint64_t id = next_id.fetch_add(1);
  std::mutex mutex;  // guards everything below but the atomics and the map's readers
  std::unique_ptr<ArenaSource> source;
  std::vector<std::unique_ptr<Arena>> arenas;
  PageRuns runs;
  // Large blocks freed lately, by exact size: a training step asks for the same sizes again.
  std::unordered_map<size_t, std::vector<std::byte*>> recent;
  std::vector<std::unique_ptr<ThreadCache>> caches;
  std::vector<ThreadCache*> idle_caches;  // their threads have ended
  ArenaMap map;
  std::atomic<size_t> current{0}, peak{0}, reserved{0};

  ~AllocatorState() {
    for (const auto& arena : arenas) source->release(*arena);
  }

  void count(size_t bytes) {
    const size_t now = current.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    size_t before = peak.load(std::memory_order_relaxed);
    while (now > before && !peak.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
    }
  }
  void flush_recent() {
    for (auto& [bytes, blocks] : recent) {
      for (std::byte* block : blocks) runs.give(block, bytes);
      blocks.clear();
    }
  }
  // Under the lock.
  std::byte* take_pages(size_t bytes) {
    if (const auto found = recent.find(bytes); found != recent.end() && !found->second.empty()) {
      std::byte* block = found->second.back();
      found->second.pop_back();
      return block;
    }
    if (std::byte* base = runs.take(bytes)) return base;
    flush_recent();
    if (std::byte* base = runs.take(bytes)) return base;
    const Arena arena = source->acquire(round_up(bytes, kArenaBytes));
    CHORALE_INVARIANT(reinterpret_cast<uintptr_t>(arena.base) % kArenaBytes == 0, "arena is not aligned");
    arenas.push_back(std::make_unique<Arena>(arena));
    map.set(arena, arenas.back().get());
    reserved.fetch_add(arena.bytes);
    ASAN_POISON_MEMORY_REGION(arena.base, arena.bytes);
    runs.give(arena.base, arena.bytes);
    return runs.take(bytes);
  }
};

namespace {

// The calling thread's cache in each allocator it has used. A thread that ends leaves its caches to the next one.
struct ThreadCaches {
  struct Entry {
    std::shared_ptr<AllocatorState> state;
    ThreadCache* cache;
  };
  std::vector<Entry> entries;
  ~ThreadCaches();
};
// The last hit, kept apart because it needs no constructor: the fast path is two loads.
struct LastHit {
  uint64_t id = 0;
  ThreadCache* cache = nullptr;
  bool ending = false;
};
constinit thread_local LastHit last_hit;
thread_local ThreadCaches thread_caches;

ThreadCaches::~ThreadCaches() {
  last_hit = {.id = 0, .cache = nullptr, .ending = true};
  for (const Entry& entry : entries) {
    const std::lock_guard lock(entry.state->mutex);
    entry.state->idle_caches.push_back(entry.cache);
  }
}

[[gnu::noinline]] ThreadCache& find_cache(const std::shared_ptr<AllocatorState>& state) {
  const auto adopt = [&]() -> ThreadCache* {
    const std::lock_guard lock(state->mutex);
    if (state->idle_caches.empty()) {
      state->caches.push_back(std::make_unique<ThreadCache>());
      return state->caches.back().get();
    }
    ThreadCache* cache = state->idle_caches.back();
    state->idle_caches.pop_back();
    return cache;
  };
  // Another thread_local's destructor allocates after ours ran: the cache it gets stays with it.
  if (last_hit.ending) {
    if (last_hit.id != state->id) last_hit = {.id = state->id, .cache = adopt(), .ending = true};
    return *last_hit.cache;
  }
  for (const auto& entry : thread_caches.entries) {
    if (entry.state == state) {
      last_hit = {.id = state->id, .cache = entry.cache};
      return *entry.cache;
    }
  }
  ThreadCache* cache = adopt();
  thread_caches.entries.push_back({state, cache});
  last_hit = {.id = state->id, .cache = cache};
  return *cache;
}

inline ThreadCache& cache_of(const std::shared_ptr<AllocatorState>& state) {
  if (last_hit.id == state->id) [[likely]] return *last_hit.cache;
  return find_cache(state);
}

[[gnu::noinline]] std::byte* refill(AllocatorState& state, ThreadCache& cache, int size_class) {
  const auto at = static_cast<size_t>(size_class);
  cache.collect_remote();
  if (FreeLink* link = cache.free[at]) {
    cache.free[at] = link->next;
    return reinterpret_cast<std::byte*>(link);
  }
  const size_t bytes = class_bytes(size_class);
  ThreadCache::Span& span = cache.spans[at];
  if (span.next == span.end) {
    const size_t span_bytes = round_up(std::max(kSpanBytes, bytes), kPageBytes);
    const std::lock_guard lock(state.mutex);
    span.next = state.take_pages(span_bytes);
    span.end = span.next + span_bytes / bytes * bytes;
  }
  return std::exchange(span.next, span.next + bytes);
}

}  // namespace

CachingAllocator::CachingAllocator(std::unique_ptr<ArenaSource> source) : state_(std::make_shared<AllocatorState>()) {
  state_->source = std::move(source);
}
CachingAllocator::~CachingAllocator() = default;

Block CachingAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {};
  if (bytes > kLargestSmallBytes) {
    CHORALE_CHECK(bytes < size_t{1} << 46, "[allocator] ", bytes, " bytes asked for: is a shape wrong?");
    const size_t rounded = round_up(bytes, kPageBytes);
    std::byte* data;
    {
      const std::lock_guard lock(state_->mutex);
      data = state_->take_pages(rounded);
    }
    state_->count(rounded);
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    return {data, rounded, nullptr};
  }
  const int size_class = class_of(bytes);
  ThreadCache& cache = cache_of(state_);
  std::byte* data;
  if (FreeLink* link = cache.free[static_cast<size_t>(size_class)]) [[likely]] {
    cache.free[static_cast<size_t>(size_class)] = link->next;
    data = reinterpret_cast<std::byte*>(link);
  } else {
    data = refill(*state_, cache, size_class);
  }
  const size_t rounded = class_bytes(size_class);
  state_->count(rounded);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  return {data, rounded, &cache};
}

void CachingAllocator::deallocate(const Block& block) noexcept {
  if (!block.data) return;
  state_->current.fetch_sub(block.bytes, std::memory_order_relaxed);
  ASAN_POISON_MEMORY_REGION(block.data, block.bytes);
  if (!block.owner) {
    const std::lock_guard lock(state_->mutex);
    state_->recent[block.bytes].push_back(block.data);
    return;
  }
  ASAN_UNPOISON_MEMORY_REGION(block.data, sizeof(FreeLink));
  const int size_class = class_of(block.bytes);
  auto* link = new (block.data) FreeLink{nullptr, size_class};
  // After its thread's end a cache may already belong to another thread, so everything is remote then.
  if (last_hit.id == state_->id && last_hit.cache == block.owner) [[likely]] {
    link->next = block.owner->free[static_cast<size_t>(size_class)];
    block.owner->free[static_cast<size_t>(size_class)] = link;
    return;
  }
  link->next = block.owner->remote.load(std::memory_order_relaxed);
  while (!block.owner->remote.compare_exchange_weak(link->next, link, std::memory_order_release,
                                                    std::memory_order_relaxed)) {
  }
}

MemoryStats CachingAllocator::stats() const {
  return {state_->current.load(), state_->peak.load(), state_->reserved.load()};
}

void CachingAllocator::reset_peak() { state_->peak.store(state_->current.load()); }

void CachingAllocator::trim() {
  const std::lock_guard lock(state_->mutex);
  state_->flush_recent();
  std::erase_if(state_->arenas, [&](const std::unique_ptr<Arena>& arena) {
    if (!state_->runs.take_exactly(*arena)) return false;
    state_->map.set(*arena, nullptr);
    state_->reserved.fetch_sub(arena->bytes);
    ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->bytes);
    state_->source->release(*arena);
    return true;
  });
}

std::optional<Location> CachingAllocator::locate(const void* address) const {
  const Arena* arena = state_->map.find(address);
  if (!arena) return std::nullopt;
  return Location{*arena, static_cast<size_t>(static_cast<const std::byte*>(address) - arena->base)};
}

ArenaSource& CachingAllocator::source() { return *state_->source; }

void CachingAllocator::set_source(std::unique_ptr<ArenaSource> source) {
  const std::lock_guard lock(state_->mutex);
  CHORALE_CHECK_STATE(state_->arenas.empty(), "[allocator] the source of memory can change only before the first tensor; ",
                      state_->reserved.load(), " bytes are in use already");
  state_->source = std::move(source);
}

CachingAllocator& cpu_allocator() {
  // Never destroyed: tensors in static storage may outlive everything.
  static auto* const allocator =
      new CachingAllocator(config::one_of_several_ranks() ? shared_pages() : private_pages());
  return *allocator;
}

Allocator& allocator_of(Device device) {
  if (device.type == DeviceType::kCpu) [[likely]] return cpu_allocator();
  throw InvalidArgument(concat("[allocator] device ", device, " has no memory here"));
}

}  // namespace chorale
