#include "chorale/device/stream_allocator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"

namespace chorale {
namespace {

// The entry that covers `address`.
template <class Map>
auto find_around(Map& map, const void* address) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(address));
  auto found = map.upper_bound(at);
  if (found == map.begin()) return map.end();
  --found;
  return at < found->first + found->second.bytes ? found : map.end();
}

}  // namespace

StreamAllocator::StreamAllocator(Device device, std::unique_ptr<GrowingMemory> memory, size_t unit)
    : device_(device), unit_(unit), memory_(std::move(memory)) {}
StreamAllocator::~StreamAllocator() = default;

// True when `stream` may have the block now. Asking for a block of another stream puts an event there, which later
// calls look at.
bool StreamAllocator::is_free_for(Free& run, const Stream& stream) {
  if (early_reuse_) return true;
  std::erase_if(run.awaited, [](const auto& event) { return event->done(); });
  if (!run.awaited.empty()) return false;
  if (run.stream == stream) return true;
  if (keeper_of(run.stream) != 0) return false;  // an event would become part of what is recorded there
  if (!run.released) run.released = runtime_of(run.stream.device).record(run.stream);
  return run.released->done();
}

// The smallest that fits, the stream's own before those of others.
StreamAllocator::FreeMap::iterator StreamAllocator::find_fit(size_t bytes, const Stream& stream, uint64_t keeper) {
  auto best = free_.end();
  const auto is_better = [&](const Free& run) {
    if (best == free_.end()) return true;
    const bool own = run.stream == stream, best_own = best->second.stream == stream;
    return own != best_own ? own : run.bytes < best->second.bytes;
  };
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second.keeper == keeper && at->second.bytes >= bytes && is_better(at->second) &&
        is_free_for(at->second, stream))
      best = at;
  }
  return best;
}

memory::Block StreamAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {};
  CHORALE_CHECK(bytes < size_t{1} << 47, "[allocate] ", bytes, " bytes are more than any device has");
  const Stream stream = current_stream(device_);
  const size_t rounded = (bytes + unit_ - 1) / unit_ * unit_;
  const std::lock_guard lock(mutex_);
  std::byte* data = nullptr;
  const uint64_t keeper = keeper_of(stream);
  if (const auto found = find_fit(rounded, stream, keeper); found != free_.end()) {
    Free run = std::move(found->second);
    data = found->first;
    free_.erase(found);
    if (run.bytes > rounded) {
      run.bytes -= rounded;
      free_.emplace(data + rounded, std::move(run));
    }
  } else {
    memory_->grow(end_ + rounded);
    data = memory_->base() + end_;
    end_ += rounded;
    stats_.reserved_bytes = end_;
  }
  live_.emplace(data, Live{rounded, stream, keeper, {}, {}});
  stats_.current_bytes += rounded;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
  return {data, rounded, nullptr};
}

void StreamAllocator::deallocate(const memory::Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(block.data);
  if (found == live_.end()) return;
  Live& live = found->second;
  stats_.current_bytes -= live.bytes;
  Free run{live.bytes, live.stream, live.keeper, {}, nullptr};
  for (const Stream& other : live.others) run.awaited.push_back(runtime_of(other.device).record(other));
  live_.erase(found);
  free(block.data, std::move(run));
}

// Neighbours become one where the same stream may have both at once.
void StreamAllocator::free(std::byte* data, Free run) {
  const auto joins = [](const Free& a, const Free& b) {
    return a.stream == b.stream && a.keeper == b.keeper && a.awaited.empty() && b.awaited.empty() && !a.released &&
           !b.released;
  };
  auto next = free_.lower_bound(data);
  if (next != free_.end() && next->first == data + run.bytes && joins(run, next->second)) {
    run.bytes += next->second.bytes;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == data && joins(before->second, run)) {
      before->second.bytes += run.bytes;
      return;
    }
  }
  free_.emplace(data, std::move(run));
}

uint64_t StreamAllocator::keeper_of(const Stream& stream) const {
  for (const auto& [kept, keeper] : keeping_) {
    if (kept == stream) return keeper;
  }
  return 0;
}
uint64_t StreamAllocator::begin_keeping(Stream stream) {
  const std::lock_guard lock(mutex_);
  keeping_.emplace_back(stream, ++last_keeper_);
  return last_keeper_;
}
void StreamAllocator::end_keeping(Stream stream) {
  const std::lock_guard lock(mutex_);
  std::erase_if(keeping_, [&](const auto& one) { return one.first == stream; });
}
bool StreamAllocator::hand_over(const void* address, Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = find_around(live_, address);
  const uint64_t keeper = keeper_of(stream);
  if (found == live_.end() || keeper == 0 || !(found->second.stream == stream)) return false;
  found->second.keeper = keeper;
  return true;
}
void StreamAllocator::release_kept(uint64_t keeper) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [data, live] : live_) {
    if (live.keeper == keeper) live.keeper = 0;
  }
  for (auto& [data, run] : free_) {
    if (run.keeper == keeper) run.keeper = 0;
  }
}

MemoryStats StreamAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void StreamAllocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.current_bytes;
}

void StreamAllocator::record_stream(const void* address, Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = find_around(live_, address);
  CHORALE_CHECK(found != live_.end(), "[record_stream] there is no live block of ", device_, " at ", address);
  Live& live = found->second;
  if (stream == live.stream || std::find(live.others.begin(), live.others.end(), stream) != live.others.end()) return;
  live.others.push_back(stream);
}

void StreamAllocator::set_label(const void* address, std::string label) {
  const std::lock_guard lock(mutex_);
  if (const auto found = find_around(live_, address); found != live_.end()) found->second.label = std::move(label);
}

std::string StreamAllocator::label_of(const void* address) const {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return "a block (which one is not known: the allocator is busy)";
  if (const auto found = find_around(live_, address); found != live_.end()) {
    const Live& live = found->second;
    return concat("a block of ", live.bytes, " bytes", live.label.empty() ? "" : ", ", live.label);
  }
  return "a block that was freed";
}

}  // namespace chorale
