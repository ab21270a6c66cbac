#include "chorale/kernel/index_layout.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::kernel {

IndexLayout index_layout(const char* op, const Shape& x, std::span<const Tensor> indices) {
  CHORALE_CHECK(indices.size() <= x.size(), "[", op, "] ", indices.size(), " indices for a tensor of shape ", x);
  IndexLayout layout;
  size_t count = 0;
  for (size_t d = 0; d < indices.size(); ++d) {
    if (!indices[d].defined()) continue;
    CHORALE_CHECK(indices[d].dtype() == DType::kI64 || indices[d].dtype() == DType::kI32, "[", op,
                  "] index tensors are i64 or i32, not ", indices[d].dtype());
    if (count++ == 0) layout.first = d;
    layout.last = d;
    layout.picked = broadcast_shapes(op, layout.picked, indices[d].sizes());
  }
  CHORALE_CHECK(count > 0, "[", op, "] needs at least one index tensor");
  layout.aside = layout.last - layout.first + 1 == count;
  for (size_t d = 0; d < x.size(); ++d) {
    const bool indexed = d < indices.size() && indices[d].defined();
    if (layout.aside && d == layout.first) layout.result.append(layout.picked.begin(), layout.picked.end());
    if (!indexed) layout.result.push_back(x[d]);
  }
  if (!layout.aside) {
    Shape front = layout.picked;
    front.append(layout.result.begin(), layout.result.end());
    layout.result = front;
  }
  CHORALE_CHECK(layout.result.size() <= kMaxDims, "[", op, "] the result would have shape ", layout.result,
                ": more than ", kMaxDims, " dimensions");
  return layout;
}

}  // namespace chorale::kernel
