#include "chorale/op/builder.h"
#include "chorale/op/defs/image_rules.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/nn.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using op::AsImage;

// One number per spatial dimension, where one stands for all.
int64_t entry(const char* op, const char* name, const IntList& list, int64_t spatial, int64_t dim) {
  CHORALE_CHECK(list.count == 1 || list.count == spatial, "[", op, "] ", name, " must have 1 or ", spatial,
                " entries, not ", list.shape());
  return list[list.count == 1 ? 0 : static_cast<size_t>(dim)];
}

// Height and width of a list that has the last `spatial` of them; a missing height is `height`.
SpatialList sides(const char* op, const char* name, const IntList& list, int64_t spatial, int64_t height) {
  return {spatial == 1 ? height : entry(op, name, list, spatial, 0), entry(op, name, list, spatial, spatial - 1)};
}

ValuesIndices max_pool(const char* op, int64_t spatial, const Tensor& x, const IntList& kernel, const IntList& stride,
                       const IntList& padding, const IntList& dilation, bool ceil_mode) {
  const AsImage as(op, x, spatial);
  const kernel::PoolAttrs attrs{.kernel = sides(op, "kernel", kernel, spatial, 1),
                                .stride = sides(op, "stride", stride.empty() ? kernel : stride, spatial, 1),
                                .padding = sides(op, "padding", padding, spatial, 0),
                                .dilation = sides(op, "dilation", dilation, spatial, 1),
                                .ceil_mode = ceil_mode};
  auto [values, indices] = op::call_many<2>(op::kMaxPool, attrs, as.image());
  return {as.back(values), as.back(indices)};
}

Tensor avg_pool(const char* op, int64_t spatial, const Tensor& x, const IntList& kernel, const IntList& stride,
                const IntList& padding, bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  CHORALE_CHECK(divisor != 0, "[", op, "] divisor_override must not be 0");
  const AsImage as(op, x, spatial);
  const kernel::AvgPoolAttrs attrs{.kernel = sides(op, "kernel", kernel, spatial, 1),
                                   .stride = sides(op, "stride", stride.empty() ? kernel : stride, spatial, 1),
                                   .padding = sides(op, "padding", padding, spatial, 0),
                                   .ceil_mode = ceil_mode,
                                   .count_include_pad = count_include_pad,
                                   .divisor = divisor.value_or(0)};
  return as.back(op::call(op::kAvgPool, attrs, as.image()));
}

kernel::AreaAttrs area_of(const char* op, const Tensor& image, int64_t spatial, const IntList& size) {
  const auto side = [&](int64_t dim, int64_t given) { return given == -1 ? image.size(2 + dim) : given; };
  const int64_t height = spatial == 1 ? 1 : entry(op, "size", size, spatial, 0);
  return {side(0, height), side(1, entry(op, "size", size, spatial, spatial - 1))};
}

Tensor adaptive_avg_pool(const char* op, int64_t spatial, const Tensor& x, const IntList& size) {
  const AsImage as(op, x, spatial);
  return as.back(op::call(op::kAdaptiveAvgPool, area_of(op, as.image(), spatial, size), as.image()));
}

ValuesIndices adaptive_max_pool(const char* op, int64_t spatial, const Tensor& x, const IntList& size) {
  const AsImage as(op, x, spatial);
  auto [values, indices] = op::call_many<2>(op::kAdaptiveMaxPool, area_of(op, as.image(), spatial, size), as.image());
  return {as.back(values), as.back(indices)};
}

}  // namespace

ValuesIndices max_pool1d_with_indices(const Tensor& x, const IntList& kernel, const IntList& stride,
                                      const IntList& padding, const IntList& dilation, bool ceil_mode) {
  op::need_defined("max_pool1d_with_indices", "x", x);
  return max_pool("max_pool1d", 1, x, kernel, stride, padding, dilation, ceil_mode);
}
ValuesIndices max_pool2d_with_indices(const Tensor& x, const IntList& kernel, const IntList& stride,
                                      const IntList& padding, const IntList& dilation, bool ceil_mode) {
  op::need_defined("max_pool2d_with_indices", "x", x);
  return max_pool("max_pool2d", 2, x, kernel, stride, padding, dilation, ceil_mode);
}
Tensor max_pool1d(const Tensor& x, const IntList& kernel, const IntList& stride, const IntList& padding,
                  const IntList& dilation, bool ceil_mode) {
  op::need_defined("max_pool1d", "x", x);
  return max_pool1d_with_indices(x, kernel, stride, padding, dilation, ceil_mode).values;
}
Tensor max_pool2d(const Tensor& x, const IntList& kernel, const IntList& stride, const IntList& padding,
                  const IntList& dilation, bool ceil_mode) {
  op::need_defined("max_pool2d", "x", x);
  return max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode).values;
}

Tensor avg_pool1d(const Tensor& x, const IntList& kernel, const IntList& stride, const IntList& padding, bool ceil_mode,
                  bool count_include_pad) {
  op::need_defined("avg_pool1d", "x", x);
  return avg_pool("avg_pool1d", 1, x, kernel, stride, padding, ceil_mode, count_include_pad, {});
}
Tensor avg_pool2d(const Tensor& x, const IntList& kernel, const IntList& stride, const IntList& padding, bool ceil_mode,
                  bool count_include_pad, std::optional<int64_t> divisor_override) {
  op::need_defined("avg_pool2d", "x", x);
  return avg_pool("avg_pool2d", 2, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override);
}

Tensor adaptive_avg_pool1d(const Tensor& x, const IntList& size) {
  op::need_defined("adaptive_avg_pool1d", "x", x);
  return adaptive_avg_pool("adaptive_avg_pool1d", 1, x, size);
}
Tensor adaptive_avg_pool2d(const Tensor& x, const IntList& size) {
  op::need_defined("adaptive_avg_pool2d", "x", x);
  return adaptive_avg_pool("adaptive_avg_pool2d", 2, x, size);
}
Tensor adaptive_max_pool1d(const Tensor& x, const IntList& size) {
  op::need_defined("adaptive_max_pool1d", "x", x);
  return adaptive_max_pool("adaptive_max_pool1d", 1, x, size).values;
}
Tensor adaptive_max_pool2d(const Tensor& x, const IntList& size) {
  op::need_defined("adaptive_max_pool2d", "x", x);
  return adaptive_max_pool("adaptive_max_pool2d", 2, x, size).values;
}
ValuesIndices adaptive_max_pool2d_with_indices(const Tensor& x, const IntList& size) {
  op::need_defined("adaptive_max_pool2d_with_indices", "x", x);
  return adaptive_max_pool("adaptive_max_pool2d", 2, x, size);
}

}  // namespace chorale
