// Where the windows of a pooling lie, along one dimension.
#pragma once

#include <algorithm>
#include <vector>

#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel {

// One dimension of a window.
struct PoolSide {
  int64_t kernel = 1, stride = 1, padding = 0, dilation = 1;

  int64_t reach() const { return (kernel - 1) * dilation + 1; }
  // How many windows an input of this size has; 0 or less if none fits.
  int64_t outputs(int64_t size, bool ceil_mode) const {
    // A window that does not fit may still be the one that reaches beyond the end.
    const int64_t room = size + 2 * padding - reach() + (ceil_mode ? stride - 1 : 0);
    int64_t count = (room < 0 ? -1 : room / stride) + 1;
    // The last window must begin inside the input or the padding before it.
    if (ceil_mode && (count - 1) * stride >= size + padding) --count;
    return count;
  }
};

struct PoolWindow {
  PoolSide height, width;
};
inline PoolWindow window_of(const PoolAttrs& a) {
  const auto side = [&](size_t i) { return PoolSide{a.kernel[i], a.stride[i], a.padding[i], a.dilation[i]}; };
  return {side(0), side(1)};
}
// Windows of means have no dilation.
template <class Attrs>
PoolWindow window_of(const Attrs& a) {
  const auto side = [&](size_t i) { return PoolSide{a.kernel[i], a.stride[i], a.padding[i], 1}; };
  return {side(0), side(1)};
}

// The part of a window that lies in the input: begin, begin + step, … below end.
struct PoolSpan {
  int64_t begin, end, step;
  int64_t padded;  // elements of the window, those in the padding included

  int64_t count() const { return begin < end ? (end - begin + step - 1) / step : 0; }
};

inline std::vector<PoolSpan> window_spans(const PoolSide& side, int64_t size, int64_t outputs) {
  std::vector<PoolSpan> spans;
  for (int64_t i = 0; i < outputs; ++i) {
    const int64_t first = i * side.stride - side.padding, last = std::min(first + side.reach(), size + side.padding);
    const int64_t skipped = first < 0 ? (-first + side.dilation - 1) / side.dilation : 0;
    const int64_t padded = (last - first + side.dilation - 1) / side.dilation;
    spans.push_back({first + skipped * side.dilation, std::min(last, size), side.dilation, padded});
  }
  return spans;
}

// The windows of an adaptive pooling divide the input as evenly as they can, overlapping where they must.
inline std::vector<PoolSpan> adaptive_spans(int64_t size, int64_t outputs) {
  std::vector<PoolSpan> spans;
  for (int64_t i = 0; i < outputs; ++i) {
    const int64_t begin = i * size / outputs, end = ((i + 1) * size + outputs - 1) / outputs;
    spans.push_back({begin, end, 1, end - begin});
  }
  return spans;
}

}  // namespace chorale::kernel
