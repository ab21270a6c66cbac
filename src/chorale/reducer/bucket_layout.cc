#include "chorale/reducer/bucket_layout.h"

#include <algorithm>

namespace chorale::reducer {

BucketLayout layout_of_rank_0(const comm::Group& group, const BucketLayout& own, size_t gradients) {
  // All indices, then the sizes of the buckets; zeros follow.
  std::vector<int64_t> message(2 * gradients, 0);
  size_t at = 0;
  for (size_t b = 0; b < own.size(); ++b) {
    for (size_t i : own[b]) message[at++] = static_cast<int64_t>(i);
    message[gradients + b] = static_cast<int64_t>(own[b].size());
  }
  group.broadcast(std::span(message), group.global_rank(0)).wait();
  BucketLayout layout;
  at = 0;
  for (size_t b = 0; b < gradients && message[gradients + b] > 0; ++b) {
    layout.emplace_back();
    for (int64_t i = 0; i < message[gradients + b]; ++i) layout.back().push_back(static_cast<size_t>(message[at++]));
  }
  return layout;
}

namespace {
int64_t in_whole_lines(int64_t elems, DType dtype) {
  const auto line = static_cast<int64_t>(64 / size_of(dtype));
  return (elems + line - 1) / line * line;
}
}  // namespace

BucketArenas::Arena& BucketArenas::of(DType dtype, Device device) {
  const auto found = std::find_if(arenas_.begin(), arenas_.end(),
                                  [&](const Arena& a) { return a.dtype == dtype && a.device == device; });
  return found != arenas_.end() ? *found : arenas_.emplace_back(Arena{.dtype = dtype, .device = device});
}

void BucketArenas::add_room(DType dtype, Device device, int64_t elems) {
  of(dtype, device).room += elems + in_whole_lines(1, dtype);
}

void BucketArenas::start_over(bool anew) {
  for (Arena& arena : arenas_) {
    arena.used = 0;
    if (anew) arena.memory = {};
  }
}

BucketArenas::Stretch BucketArenas::cut(DType dtype, Device device, int64_t elems) {
  Arena& arena = of(dtype, device);
  if (!arena.memory.defined()) arena.memory = Tensor::empty({arena.room}, dtype, device);
  const int64_t offset = arena.used;
  arena.used += in_whole_lines(elems, dtype);
  return {arena.memory, offset};
}

}  // namespace chorale::reducer
