#include "chorale/device/allocator.h"

#include <pthread.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/device/pages.h"
#include "chorale/device/runtime.h"
#include "chorale/device/shared_pages.h"

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
static_assert(class_of(memory::kLargestSmallBytes) == kClasses - 1 &&
              class_bytes(kClasses - 1) == memory::kLargestSmallBytes);
static_assert(class_bytes(class_of(513)) == 640 && class_bytes(class_of(640)) == 640 && class_of(1) == 0);

// Blocks of larger classes are whole pages.
constexpr size_t kLargestSharingBytes = 16 << 10;
constexpr bool large_classes_are_whole_pages() {
  for (int c = 0; c < kClasses; ++c) {
    if (class_bytes(c) > kLargestSharingBytes && class_bytes(c) % memory::kPageBytes != 0) return false;
  }
  return true;
}
static_assert(large_classes_are_whole_pages() && kSpanBytes % memory::kPageBytes == 0);

struct FreeLink {
  FreeLink* next;
  int size_class;
};

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

std::atomic<uint64_t> next_id{1};

// Blocks of one class, cut from a run of pages.
struct Span {
  size_t bytes;
  int size_class;
  size_t free_blocks = 0;  // counted by release_spans()
};

}  // namespace

// Free lists of one thread. Only its thread touches it, but for `remote`, where other threads push.
struct memory::ThreadCache {
  std::array<FreeLink*, kClasses> free{};
  // Where the next block of a class is cut off when the list is empty.
  struct Rest {
    std::byte* next = nullptr;
    std::byte* end = nullptr;
  };
  std::array<Rest, kClasses> rests{};
  std::map<std::byte*, Span> spans;
  alignas(memory::kBlockAlignment) std::atomic<FreeLink*> remote{nullptr};

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

// Which allocators there are is a fact about the process: fork() copies them all.
struct AllAllocators {
  std::mutex mutex;
  std::vector<memory::AllocatorState*> states;
};
AllAllocators& all_allocators();

struct memory::AllocatorState {
  AllocatorState() {
    AllAllocators& all = all_allocators();
    const std::lock_guard lock(all.mutex);
    all.states.push_back(this);
  }
  const uint64_t id = next_id.fetch_add(1);
  std::mutex mutex;  // guards everything below but the atomics and the map's readers
  std::unique_ptr<memory::ArenaSource> source;
  std::vector<std::unique_ptr<memory::Arena>> arenas;
  std::vector<std::unique_ptr<memory::Arena>> returned;  // a reader of the map may still look at them
  ArenaMap map;
  PageRuns runs{map};
  // Large blocks freed lately, by exact size: a training step asks for the same sizes again.
  std::unordered_map<size_t, std::vector<std::byte*>> recent;
  std::vector<std::unique_ptr<memory::ThreadCache>> caches;
  std::vector<memory::ThreadCache*> idle_caches;  // their threads have ended
  std::atomic<size_t> current{0}, peak{0}, reserved{0};

  ~AllocatorState() {
    {
      AllAllocators& all = all_allocators();
      const std::lock_guard lock(all.mutex);
      std::erase(all.states, this);
    }
    for (const auto& arena : arenas) give_back(*arena);
  }
  SharedPages* shared() const { return dynamic_cast<SharedPages*>(source.get()); }

  void count(size_t bytes) { raise_peak(current.fetch_add(bytes, std::memory_order_relaxed) + bytes); }
  void raise_peak(size_t to) {
    size_t before = peak.load(std::memory_order_relaxed);
    while (to > before && !peak.compare_exchange_weak(before, to, std::memory_order_acq_rel)) {
    }
  }

  // The rest is called under the lock.
  void give_back(const memory::Arena& arena) {
    ASAN_UNPOISON_MEMORY_REGION(arena.base, arena.bytes);
    source->release(arena);
  }
  void flush_recent() {
    for (const auto& [bytes, blocks] : recent) {
      for (std::byte* block : blocks) runs.give(block, bytes);
    }
    recent.clear();
  }
  std::byte* take_pages(size_t bytes) {
    if (const auto found = recent.find(bytes); found != recent.end() && !found->second.empty()) {
      std::byte* block = found->second.back();
      found->second.pop_back();
      return block;
    }
    std::byte* base = find_pages(bytes);
    if (SharedPages* pages = shared()) pages->make_huge(base, bytes);
    return base;
  }
  std::byte* find_pages(size_t bytes) {
    if (std::byte* base = runs.take(bytes)) return base;
    flush_recent();
    if (std::byte* base = runs.take(bytes)) return base;
    const memory::Arena arena = source->acquire(round_up(bytes, memory::kArenaBytes));
    CHORALE_INVARIANT(reinterpret_cast<uintptr_t>(arena.base) % memory::kArenaBytes == 0, "arena is not aligned");
    arenas.push_back(std::make_unique<memory::Arena>(arena));
    map.set(*arenas.back());
    reserved.fetch_add(arena.bytes);
    ASAN_POISON_MEMORY_REGION(arena.base, arena.bytes);
    runs.give(arena.base, arena.bytes);
    return runs.take(bytes);
  }
  // Gives back the pages of spans without live blocks. The caller is the cache's thread, or the cache has none.
  void release_spans(memory::ThreadCache& cache) {
    cache.collect_remote();
    const auto span_of = [&](std::byte* block) { return std::prev(cache.spans.upper_bound(block)); };
    for (size_t c = 0; c < kClasses; ++c) {
      for (FreeLink* link = cache.free[c]; link; link = link->next) {
        ++span_of(reinterpret_cast<std::byte*>(link))->second.free_blocks;
      }
      const memory::ThreadCache::Rest& rest = cache.rests[c];
      if (rest.next != rest.end) {
        span_of(rest.next)->second.free_blocks +=
            static_cast<size_t>(rest.end - rest.next) / class_bytes(static_cast<int>(c));
      }
    }
    const auto is_dead = [](const Span& span) { return span.free_blocks == span.bytes / class_bytes(span.size_class); };
    for (size_t c = 0; c < kClasses; ++c) {
      FreeLink** at = &cache.free[c];
      while (FreeLink* link = *at) {
        if (is_dead(span_of(reinterpret_cast<std::byte*>(link))->second)) {
          *at = link->next;
        } else {
          at = &link->next;
        }
      }
      memory::ThreadCache::Rest& rest = cache.rests[c];
      if (rest.next != rest.end && is_dead(span_of(rest.next)->second)) rest = {};
    }
    for (auto at = cache.spans.begin(); at != cache.spans.end();) {
      if (is_dead(at->second)) {
        ASAN_POISON_MEMORY_REGION(at->first, at->second.bytes);
        runs.give(at->first, at->second.bytes);
        at = cache.spans.erase(at);
      } else {
        at->second.free_blocks = 0;
        ++at;
      }
    }
  }
};

namespace {

// The calling thread's cache in each allocator it has used. A thread that ends leaves its caches to the next one.
struct ThreadCaches {
  struct Entry {
    uint64_t id;
    std::weak_ptr<memory::AllocatorState> state;
    memory::ThreadCache* cache;
  };
  std::vector<Entry> entries;
  ~ThreadCaches();
};
// The last hit, kept apart because it needs no constructor: the fast path is two loads.
struct LastHit {
  uint64_t id = 0;
  memory::ThreadCache* cache = nullptr;
  bool ending = false;  // thread_caches is gone
};
constinit thread_local LastHit last_hit;
thread_local ThreadCaches thread_caches;

memory::ThreadCache* adopt_cache(memory::AllocatorState& state) {
  const std::lock_guard lock(state.mutex);
  if (state.idle_caches.empty()) {
    state.caches.push_back(std::make_unique<memory::ThreadCache>());
    return state.caches.back().get();
  }
  memory::ThreadCache* cache = state.idle_caches.back();
  state.idle_caches.pop_back();
  return cache;
}
void leave_cache(memory::AllocatorState& state, memory::ThreadCache* cache) {
  const std::lock_guard lock(state.mutex);
  state.idle_caches.push_back(cache);
}

ThreadCaches::~ThreadCaches() {
  last_hit = {.id = 0, .cache = nullptr, .ending = true};
  for (const Entry& entry : entries) {
    if (const auto state = entry.state.lock()) leave_cache(*state, entry.cache);
  }
}

// Null when the thread is ending and has no cache any more.
[[gnu::noinline]] memory::ThreadCache* find_cache(const std::shared_ptr<memory::AllocatorState>& state) {
  if (last_hit.ending) return nullptr;
  auto& entries = thread_caches.entries;
  auto found = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return entry.id == state->id; });
  if (found == entries.end()) {
    std::erase_if(entries, [](const auto& entry) { return entry.state.expired(); });
    entries.push_back({state->id, state, adopt_cache(*state)});
    found = std::prev(entries.end());
  }
  last_hit = {.id = state->id, .cache = found->cache};
  return found->cache;
}

inline memory::ThreadCache* cache_of(const std::shared_ptr<memory::AllocatorState>& state) {
  if (last_hit.id == state->id) [[likely]]
    return last_hit.cache;
  return find_cache(state);
}

[[gnu::noinline]] std::byte* refill(memory::AllocatorState& state, memory::ThreadCache& cache, int size_class) {
  const auto at = static_cast<size_t>(size_class);
  cache.collect_remote();
  if (FreeLink* link = cache.free[at]) {
    cache.free[at] = link->next;
    return reinterpret_cast<std::byte*>(link);
  }
  const size_t bytes = class_bytes(size_class);
  memory::ThreadCache::Rest& rest = cache.rests[at];
  if (rest.next == rest.end) {
    const size_t span_bytes = round_up(bytes * std::max<size_t>(kSpanBytes / bytes, 1), memory::kPageBytes);
    const std::lock_guard lock(state.mutex);
    rest.next = state.take_pages(span_bytes);
    rest.end = rest.next + span_bytes / bytes * bytes;
    cache.spans.emplace(rest.next, Span{span_bytes, size_class});
  }
  return std::exchange(rest.next, rest.next + bytes);
}

inline std::byte* take_block(memory::AllocatorState& state, memory::ThreadCache& cache, int size_class) {
  FreeLink*& head = cache.free[static_cast<size_t>(size_class)];
  if (!head) [[unlikely]]
    return refill(state, cache, size_class);
  return reinterpret_cast<std::byte*>(std::exchange(head, head->next));
}

}  // namespace

CachingAllocator::CachingAllocator(std::unique_ptr<memory::ArenaSource> source)
    : state_(std::make_shared<memory::AllocatorState>()) {
  state_->source = std::move(source);
}
CachingAllocator::~CachingAllocator() = default;

memory::Block CachingAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {};
  if (bytes > memory::kLargestSmallBytes) {
    CHORALE_CHECK(bytes < size_t{1} << 46, "[allocator] ", bytes, " bytes asked for: is a shape wrong?");
    const size_t rounded = round_up(bytes, memory::kPageBytes);
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
  memory::ThreadCache* cache = cache_of(state_);
  std::byte* data;
  if (cache) [[likely]] {
    data = take_block(*state_, *cache, size_class);
  } else {
    // Another thread_local's destructor allocates after ours ran: it borrows a cache for the moment.
    cache = adopt_cache(*state_);
    data = take_block(*state_, *cache, size_class);
    leave_cache(*state_, cache);
  }
  const size_t rounded = class_bytes(size_class);
  state_->count(rounded);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  return {data, rounded, cache};
}

void CachingAllocator::deallocate(const memory::Block& block) noexcept {
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

void CachingAllocator::reset_peak() {
  // Twice: what another thread allocated between reading and writing is not lost.
  state_->peak.exchange(state_->current.load(), std::memory_order_acq_rel);
  state_->raise_peak(state_->current.load());
}

void CachingAllocator::trim() {
  memory::ThreadCache* own = cache_of(state_);
  const std::lock_guard lock(state_->mutex);
  if (own) state_->release_spans(*own);
  for (memory::ThreadCache* idle : state_->idle_caches) state_->release_spans(*idle);
  state_->flush_recent();
  std::vector<std::unique_ptr<memory::Arena>> kept;
  for (std::unique_ptr<memory::Arena>& arena : state_->arenas) {
    if (!state_->runs.take_whole(*arena)) {
      kept.push_back(std::move(arena));
      continue;
    }
    state_->map.forget(*arena);
    state_->reserved.fetch_sub(arena->bytes);
    state_->give_back(*arena);
    state_->returned.push_back(std::move(arena));
  }
  state_->arenas = std::move(kept);
}

bool owns_pages(const std::byte* begin, size_t bytes) {
  const auto is_aligned = [](const std::byte* at) { return reinterpret_cast<uintptr_t>(at) % memory::kPageBytes == 0; };
  return bytes > kLargestSharingBytes || (is_aligned(begin) && is_aligned(begin + bytes));
}

std::optional<memory::Location> CachingAllocator::locate(const void* address) const {
  const memory::Arena* arena = state_->map.find(address);
  if (!arena) return std::nullopt;
  return memory::Location{*arena, static_cast<size_t>(static_cast<const std::byte*>(address) - arena->base)};
}

memory::ArenaSource& CachingAllocator::source() { return *state_->source; }

void CachingAllocator::set_source(std::unique_ptr<memory::ArenaSource> source) {
  const std::lock_guard lock(state_->mutex);
  CHORALE_CHECK_STATE(state_->arenas.empty(),
                      "[allocator] the source of memory can change only before the first tensor; ",
                      state_->reserved.load(), " bytes are in use already");
  state_->source = std::move(source);
}

// ---- fork: no lock may be held by a thread that the child does not have, and shared pages become the child's own

namespace {

void before_fork() {
  all_allocators().mutex.lock();
  for (memory::AllocatorState* state : all_allocators().states) {
    state->mutex.lock();
    if (SharedPages* pages = state->shared()) pages->before_fork();
  }
}
void after_fork(void (SharedPages::*resume)() noexcept) {
  for (memory::AllocatorState* state : all_allocators().states) {
    if (SharedPages* pages = state->shared()) (pages->*resume)();
    state->mutex.unlock();
  }
  all_allocators().mutex.unlock();
}

}  // namespace

AllAllocators& all_allocators() {
  // Never destroyed: allocators in static storage may outlive everything.
  static auto* const all = [] {
    pthread_atfork(
        before_fork, [] { after_fork(&SharedPages::after_fork_in_parent); },
        [] { after_fork(&SharedPages::after_fork_in_child); });
    return new AllAllocators;
  }();
  return *all;
}

CachingAllocator& cpu_allocator() {
  // Never destroyed: tensors in static storage may outlive everything.
  static auto* const allocator =
      new CachingAllocator(config::one_of_several_ranks() ? shared_pages() : private_pages());
  return *allocator;
}

Allocator& allocator_of(Device device) {
  if (device == kCpu) [[likely]]
    return cpu_allocator();
  CHORALE_CHECK(device.type != DeviceType::kNull, "[allocator] device null has no memory");
  CHORALE_CHECK(device.type != DeviceType::kCpu, "[allocator] there is no device ", device,
                ": the host is one device, cpu");
  return runtime_of(device).allocator(device);
}

}  // namespace chorale
