#include "chorale/kernel/cpu/scratch.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>
#include <vector>

namespace chorale::kernel::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Block {
  void* data;
  size_t capacity;
};

// More blocks than nested calls need; reserved, so that giving one back cannot fail.
constexpr size_t kMaxFree = 16;

struct Pool {
  std::vector<Block> free;  // in order of capacity: the smallest that is large enough is taken
  Pool() { free.reserve(kMaxFree); }
  ~Pool() {
    for (const Block& block : free) ::operator delete(block.data, kAlignment);
  }
};

Pool& pool() {
  thread_local Pool instance;
  return instance;
}

}  // namespace

Scratch::Scratch(size_t bytes) {
  if (bytes == 0) return;
  std::vector<Block>& free = pool().free;
  const auto block = std::lower_bound(free.begin(), free.end(), bytes,
                                      [](const Block& b, size_t wanted) { return b.capacity < wanted; });
  if (block != free.end()) {
    data_ = block->data;
    capacity_ = block->capacity;
    free.erase(block);
    return;
  }
  // Too small a block is given up for the larger one, which serves its purpose too.
  if (!free.empty()) {
    ::operator delete(free.back().data, kAlignment);
    free.pop_back();
  }
  capacity_ = bytes <= kKeptBytes ? std::bit_ceil(std::max<size_t>(bytes, 4096)) : bytes;
  data_ = ::operator new(capacity_, kAlignment);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  std::vector<Block>& free = pool().free;
  if (capacity_ > kKeptBytes || free.size() == kMaxFree) {
    ::operator delete(data_, kAlignment);
    return;
  }
  const auto at = std::lower_bound(free.begin(), free.end(), capacity_,
                                   [](const Block& b, size_t wanted) { return b.capacity < wanted; });
  free.insert(at, Block{data_, capacity_});
}

}  // namespace chorale::kernel::cpu
