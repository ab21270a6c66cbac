// Sizes and strides. Everything counts elements, not bytes. No heap for up to 6 dimensions.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <limits>
#include <optional>
#include <span>

#include "chorale/base/dims.h"
#include "chorale/base/small_vector.h"

namespace chorale {

// With at most so many elements, bytes fit into int64_t for every dtype.
inline constexpr int64_t kMaxElems = std::numeric_limits<int64_t>::max() / 16;

using Shape = SmallVector<int64_t, 6>;
using Strides = SmallVector<int64_t, 6>;

std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [2, 3]

// The number of elements; throws InvalidArgument for a negative size and for more than kMaxElems.
int64_t count_elems(std::span<const int64_t> sizes);
// Row-major: the last dimension moves fastest.
Strides contiguous_strides(std::span<const int64_t> sizes);
// Channels fastest: N, spatial…, C in memory for sizes [N, C, spatial…]; 3 to 5 dimensions.
Strides channels_last_strides(std::span<const int64_t> sizes);
// Dimensions of size 1 may have any stride, and a tensor without elements is always contiguous.
bool is_contiguous(std::span<const int64_t> sizes, std::span<const int64_t> strides);
bool is_channels_last(std::span<const int64_t> sizes, std::span<const int64_t> strides);
// True when the elements fill a stretch of memory without holes or overlaps, in whatever order.
bool is_dense(std::span<const int64_t> sizes, std::span<const int64_t> strides);

namespace memory {
// The elements that a view touches, relative to its element 0: from low to high, exclusively.
struct Reach {
  int64_t low = 0, high = 0;
};
}  // namespace memory
// What a view with these sizes and strides touches; nothing when that is a stretch of more than kMaxElems.
std::optional<memory::Reach> reach_of(std::span<const int64_t> sizes, std::span<const int64_t> strides);

// The shape of a and b combined; throws InvalidArgument, naming `op`, when they do not fit.
Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b);
// Strides that read a tensor of `sizes` as if it had shape `to`: 0 where it is repeated. The shapes must fit.
Strides broadcast_strides(const Shape& sizes, const Strides& strides, const Shape& to);

// dim counted from the end when negative; throws InvalidArgument, naming `op`. A scalar has the one dimension 0.
int64_t normalize_dim(const char* op, int64_t dim, int64_t dims);

// Sets `result` to strides that show the elements of `sizes` as shape `to` (of the same count); false when that needs a
// copy.
bool view_strides(const Shape& sizes, const Strides& strides, const Shape& to, Strides& result);

}  // namespace chorale
