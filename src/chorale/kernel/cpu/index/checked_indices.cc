#include "chorale/kernel/cpu/index/checked_indices.h"

#include <atomic>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/support/copy.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kCheckGrain = 1 << 15;

// Whether any value is negative or reaches the bound.
bool any_beyond(std::span<const int64_t> values, uint64_t bound) {
  std::atomic<bool> found = false;
  parallel_for(static_cast<int64_t>(values.size()), kCheckGrain, [&](int64_t begin, int64_t end) {
    // The sign of v, and of bound - 1 - v: without comparisons, which 64-bit vectors lack before SSE4.2. Unsigned,
    // because the difference may wrap around; it does so only for a negative v, whose own sign tells.
    uint64_t signs = 0;
    for (int64_t i = begin; i < end; ++i) {
      const auto v = static_cast<uint64_t>(values[static_cast<size_t>(i)]);
      signs |= v | (bound - 1 - v);
    }
    if (signs >> 63) found = true;
  });
  return found;
}

Shape position_of(int64_t flat, const Shape& sizes) {
  Shape position(sizes.size());
  for (size_t d = sizes.size(); d-- > 0;) {
    position[d] = flat % sizes[d];
    flat /= sizes[d];
  }
  return position;
}

}  // namespace

Tensor checked_indices(const char* op, const Tensor& index, int64_t bound, int64_t dim, Negative negative) {
  const Tensor indices = contiguous(index, DType::kI64);
  const auto values = indices.span<const int64_t>();
  if (!any_beyond(values, static_cast<uint64_t>(bound))) return indices;

  const int64_t least = negative == Negative::kFromEnd ? -bound : 0;
  for (size_t i = 0; i < values.size(); ++i) {
    CHORALE_CHECK(values[i] >= least && values[i] < bound, "[", op, "] index ", values[i], " at position ",
                  position_of(static_cast<int64_t>(i), index.sizes()), " is out of range: dimension ", dim,
                  " has size ", bound);
  }
  const Tensor moved = Tensor::empty(index.sizes(), DType::kI64);
  const auto to = moved.span<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) to[i] = values[i] < 0 ? values[i] + bound : values[i];
  return moved;
}

}  // namespace chorale::kernel::cpu
