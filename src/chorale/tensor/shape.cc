#include "chorale/tensor/shape.h"

#include <algorithm>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale {

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i];
  return out << ']';
}

namespace {
// Only shapes without elements reach the bound: their strides are never used, but must not overflow either.
int64_t saturated_product(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}
}  // namespace

int64_t count_elems(std::span<const int64_t> sizes) {
  int64_t count = 1;
  bool empty = false;
  for (int64_t size : sizes) {
    CHORALE_CHECK(size >= 0, "a size cannot be negative: ", Shape(sizes));
    empty |= size == 0;
    count = saturated_product(count, size);
  }
  if (empty) return 0;
  CHORALE_CHECK(count <= kMaxElems, "shape ", Shape(sizes), " has more elements than can be counted");
  return count;
}

Strides contiguous_strides(std::span<const int64_t> sizes) {
  Strides strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step = saturated_product(step, std::max<int64_t>(sizes[i], 1));
  }
  return strides;
}

Strides channels_last_strides(std::span<const int64_t> sizes) {
  CHORALE_CHECK(sizes.size() >= 3 && sizes.size() <= 5, "channels-last needs 3 to 5 dimensions, not ", Shape(sizes));
  Strides strides(sizes.size());
  int64_t step = std::max<int64_t>(sizes[1], 1);
  strides[1] = 1;
  for (size_t i = sizes.size(); i-- > 2;) {
    strides[i] = step;
    step = saturated_product(step, std::max<int64_t>(sizes[i], 1));
  }
  strides[0] = step;
  return strides;
}

namespace {
bool has_strides(std::span<const int64_t> sizes, std::span<const int64_t> strides, const Strides& expected) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && strides[i] != expected[i]) return false;
  }
  return true;
}
}  // namespace

bool is_contiguous(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  int64_t step = 1;
  bool matches = true;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 0) return true;
    matches &= sizes[i] == 1 || strides[i] == step;
    step = saturated_product(step, sizes[i]);
  }
  return matches;
}

bool is_channels_last(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  if (sizes.size() < 3 || sizes.size() > 5) return false;
  return has_strides(sizes, strides, channels_last_strides(sizes));
}

bool is_dense(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  int64_t rows = 1;  // elements behind a dimension of row-major memory, which is the most frequent case
  size_t behind = sizes.size();
  while (behind > 0 && (sizes[behind - 1] == 1 || strides[behind - 1] == rows)) rows *= sizes[--behind];
  if (behind == 0) return true;
  SmallVector<size_t, 8> order;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t step = 1;
  for (size_t i : order) {
    if (strides[i] != step) return false;
    step *= sizes[i];
  }
  return true;
}

std::optional<memory::Reach> reach_of(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return memory::Reach{0, 0};
  memory::Reach reach{0, 1};
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    int64_t way;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &way)) return std::nullopt;
    int64_t& bound = way < 0 ? reach.low : reach.high;
    if (__builtin_add_overflow(bound, way, &bound)) return std::nullopt;
  }
  int64_t length;
  if (__builtin_sub_overflow(reach.high, reach.low, &length) || length > kMaxElems) return std::nullopt;
  return reach;
}

Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b) {
  if (a == b) return a;
  const size_t dims = std::max(a.size(), b.size());
  Shape result(dims);
  for (size_t i = 0; i < dims; ++i) {
    const int64_t m = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t n = i < b.size() ? b[b.size() - 1 - i] : 1;
    CHORALE_CHECK(m == n || m == 1 || n == 1, "[", op, "] shapes ", a, " and ", b, " do not broadcast: sizes ", m,
                  " and ", n, " differ in dimension ", dims - 1 - i, " and neither is 1");
    result[dims - 1 - i] = m == 1 ? n : m;
  }
  return result;
}

Strides broadcast_strides(const Shape& sizes, const Strides& strides, const Shape& to) {
  Strides result(to.size(), 0);
  const size_t lead = to.size() - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    result[lead + i] = sizes[i] == 1 && to[lead + i] != 1 ? 0 : strides[i];
  }
  return result;
}

int64_t normalize_dim(const char* op, int64_t dim, int64_t count) {
  const int64_t dims = std::max<int64_t>(count, 1);
  CHORALE_CHECK(dim >= -dims && dim < dims, "[", op, "] dimension ", dim, " is out of range for a tensor of ", count,
                count == 1 ? " dimension" : " dimensions", "; expected ", -dims, " to ", dims - 1);
  return dim < 0 ? dim + dims : dim;
}

bool view_strides(const Shape& sizes, const Strides& strides, const Shape& to, Strides& result) {
  result = Strides(to.size(), 1);
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    result = contiguous_strides(to);
    return true;
  }
  // Walk both shapes from the back. A run of old dimensions that lie behind one another in memory is one stretch, which
  // new dimensions may cut as they like; a new dimension may not span two stretches.
  size_t at = to.size();
  int64_t stretch = 1;  // elements of the current run
  int64_t taken = 1;    // of those, covered by new dimensions
  int64_t step = strides.empty() ? 1 : strides.back();
  for (size_t i = sizes.size(); i-- > 0;) {
    stretch *= sizes[i];
    if (i > 0 && (sizes[i - 1] == 1 || strides[i - 1] == stretch * step)) continue;
    while (at > 0 && (taken < stretch || to[at - 1] == 1)) {
      result[at - 1] = taken * step;
      taken *= to[--at];
    }
    if (taken != stretch) return false;
    if (i > 0) step = strides[i - 1];
    stretch = taken = 1;
  }
  while (at > 0 && to[at - 1] == 1) --at;
  return at == 0;
}

}  // namespace chorale
