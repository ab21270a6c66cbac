#include "chorale/comm/lent_memory.h"

#include <algorithm>
#include <bit>

#include "chorale/base/deadline.h"

namespace chorale::comm {
namespace {

constexpr size_t kLeastBytes = size_t{64} << 10;

// Memory of groups that are gone, each piece free from a moment on.
struct Retired {
  Device device;
  PeerHandle memory;
  Deadline::Clock::time_point free_at;
};
struct Retirement {
  std::mutex mutex;
  std::vector<Retired> pieces;
};
Retirement& retirement() {
  static auto* const all = new Retirement;
  return *all;
}

}  // namespace

LentMemory::LentMemory(Device device, std::chrono::milliseconds timeout) : device_(device), timeout_(timeout) {}

LentMemory::~LentMemory() {
  Retirement& all = retirement();
  const std::lock_guard lock(all.mutex);
  const auto now = Deadline::Clock::now();
  for (const PeerHandle& memory : free_) all.pieces.push_back({device_, memory, now});
  for (const Lent& lent : lent_) all.pieces.push_back({device_, lent.memory, now + timeout_});
}

LentMemory::Lent LentMemory::lend(size_t bytes) {
  // Pieces have few sizes, so that one of a call fits the next.
  const size_t size = std::bit_ceil(std::max(bytes, kLeastBytes));
  const std::lock_guard lock(mutex_);
  Lent lent{{}, ++calls_};
  if (bytes == 0) return lent;
  const auto own = std::find_if(free_.begin(), free_.end(), [&](const PeerHandle& m) { return m.bytes == size; });
  if (own != free_.end()) {
    lent.memory = *own;
    free_.erase(own);
  } else {
    Retirement& all = retirement();
    const std::lock_guard retired_lock(all.mutex);
    const auto now = Deadline::Clock::now();
    const auto retired = std::find_if(all.pieces.begin(), all.pieces.end(), [&](const Retired& one) {
      return one.device == device_ && one.free_at <= now && one.memory.bytes == size;
    });
    if (retired != all.pieces.end()) {
      lent.memory = retired->memory;
      all.pieces.erase(retired);
    } else {
      lent.memory = find_peer_memory(device_.type)->make(device_, size);
    }
  }
  lent_.push_back(lent);
  return lent;
}

void LentMemory::note_done(const Lent& lent) {
  const std::lock_guard lock(mutex_);
  std::erase_if(lent_, [&](const Lent& one) {
    if (one.call >= lent.call) return false;
    free_.push_back(one.memory);
    return true;
  });
}

}  // namespace chorale::comm
