#include "chorale/nn/conv.h"

#include <algorithm>
#include <cmath>

#include "chorale/api/api.h"
#include "chorale/nn/init.h"

namespace chorale::nn {
namespace {

// One entry per dimension.
IntList per_dimension(const char* type, const char* what, const IntList& list, int64_t dims) {
  CHORALE_CHECK(list.count == 1 || list.count == dims, "[", type, "] expected one entry or ", dims, " for ", what,
                ", found ", list.count);
  return list.count == dims ? list : IntList(std::vector<int64_t>(static_cast<size_t>(dims), list[0]));
}

void check_channels(const char* type, int64_t in_channels, int64_t out_channels, int64_t groups) {
  CHORALE_CHECK(
      in_channels > 0 && out_channels > 0 && groups > 0 && in_channels % groups == 0 && out_channels % groups == 0, "[",
      type, "] channels must be positive multiples of groups, found ", in_channels, " and ", out_channels,
      " with groups ", groups);
}

Shape weight_shape(int64_t first, int64_t second, const IntList& kernel) {
  Shape shape = {first, second};
  for (const int64_t size : kernel) {
    CHORALE_CHECK(size > 0, "[Conv] a kernel has at least one element in each direction, not ", size);
    shape.push_back(size);
  }
  return shape;
}

std::string describe_window(int64_t in_channels, int64_t out_channels, const IntList& kernel, const IntList& stride,
                            const IntList& padding) {
  return concat(in_channels, ", ", out_channels, ", kernel=", kernel.shape(), ", stride=", stride.shape(),
                ", padding=", padding.shape());
}

}  // namespace

Conv::Conv(int64_t dims, int64_t in_channels, int64_t out_channels, const ConvOptions& options) : options_(options) {
  check_channels("Conv", in_channels, out_channels, options.groups);
  options_.kernel = per_dimension("Conv", "kernel", options.kernel, dims);
  options_.stride = per_dimension("Conv", "stride", options.stride, dims);
  options_.padding = per_dimension("Conv", "padding", options.padding, dims);
  options_.dilation = per_dimension("Conv", "dilation", options.dilation, dims);
  weight = Parameter(empty(weight_shape(out_channels, in_channels / options.groups, options_.kernel)));
  const double bound = 1 / std::sqrt(init::fans_of(weight).in);
  init::uniform_(weight, -bound, bound);
  if (options.bias) bias = Parameter(uniform({out_channels}, -bound, bound));
}

Tensor Conv::forward(const Tensor& x) const {
  const ConvOptions& o = options_;
  Tensor image = x;
  IntList padding = o.padding;
  if (o.padding_mode != PadMode::kConstant) {
    std::vector<int64_t> pads;
    for (int64_t d = padding.count - 1; d >= 0; --d) pads.insert(pads.end(), 2, padding[static_cast<size_t>(d)]);
    image = pad(x, pads, o.padding_mode);
    padding = 0;
  }
  const auto function = o.kernel.count == 1 ? conv1d : o.kernel.count == 2 ? conv2d : conv3d;
  return function(image, weight, bias, o.stride, padding, o.dilation, o.groups);
}

std::string Conv::describe() const {
  return describe_window(weight.size(1) * options_.groups, weight.size(0), options_.kernel, options_.stride,
                         options_.padding);
}

ConvTranspose::ConvTranspose(int64_t dims, int64_t in_channels, int64_t out_channels,
                             const ConvTransposeOptions& options)
    : options_(options) {
  check_channels("ConvTranspose", in_channels, out_channels, options.groups);
  options_.kernel = per_dimension("ConvTranspose", "kernel", options.kernel, dims);
  options_.stride = per_dimension("ConvTranspose", "stride", options.stride, dims);
  options_.padding = per_dimension("ConvTranspose", "padding", options.padding, dims);
  options_.output_padding = per_dimension("ConvTranspose", "output_padding", options.output_padding, dims);
  options_.dilation = per_dimension("ConvTranspose", "dilation", options.dilation, dims);
  weight = Parameter(empty(weight_shape(in_channels, out_channels / options.groups, options_.kernel)));
  const double bound = 1 / std::sqrt(init::fans_of(weight).in);
  init::uniform_(weight, -bound, bound);
  if (options.bias) bias = Parameter(uniform({out_channels}, -bound, bound));
}

Tensor ConvTranspose::forward(const Tensor& x) const {
  const ConvTransposeOptions& o = options_;
  const auto function = o.kernel.count == 1   ? conv_transpose1d
                        : o.kernel.count == 2 ? conv_transpose2d
                                              : conv_transpose3d;
  return function(x, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation);
}

std::string ConvTranspose::describe() const {
  return describe_window(weight.size(0), weight.size(1) * options_.groups, options_.kernel, options_.stride,
                         options_.padding);
}

}  // namespace chorale::nn
