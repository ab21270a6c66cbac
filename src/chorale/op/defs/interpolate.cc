#include "chorale/kernel/cpu/image/interpolate.h"

#include <cmath>

#include "chorale/op/builder.h"
#include "chorale/op/defs/image_rules.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/nn.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::InterpolateAttrs;

void infer_interpolate(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<InterpolateAttrs>();
  check_image(args, x);
  CHORALE_CHECK(a.height > 0 && a.width > 0 && x.size(2) > 0 && x.size(3) > 0, "[", args.op.name, "] cannot resize ",
                x.sizes(), " to ", a.height, " x ", a.width);
  CHORALE_CHECK(a.ratio_h > 0 && a.ratio_w > 0, "[", args.op.name, "] ratios must be positive, not ", a.ratio_h,
                " and ", a.ratio_w);
  describe_image(out[0], x, a.height, a.width, x.dtype());
}

// Both ops are linear, and each is the other's gradient.
template <const OpDef& kOther>
Tensors grad_by(const GradArgs& g) {
  InterpolateAttrs attrs = g.attrs.get<InterpolateAttrs>();
  attrs.height = g.shape(0)[2];
  attrs.width = g.shape(0)[3];
  return {call(kOther, attrs, g.dout[0])};
}

std::vector<Sample> samples_resize(bool back) {
  std::vector<Sample> samples;
  for (Interpolation mode : {Interpolation::kNearest, Interpolation::kLinear}) {
    const InterpolateAttrs up{mode, false, 5, 7, 3.0 / 5, 4.0 / 7}, down{mode, false, 2, 3, 2, 5.0 / 3};
    const auto add = [&](const Shape& small, InterpolateAttrs attrs, bool channels_last) {
      Shape sizes = back ? Shape{small[0], small[1], attrs.height, attrs.width} : small;
      if (back) {
        attrs.height = small[2];
        attrs.width = small[3];
      }
      const Tensor x =
          channels_last ? permute(sample({sizes[0], sizes[2], sizes[3], sizes[1]}), {0, 3, 1, 2}) : sample(sizes);
      samples.push_back({{x}, attrs});
    };
    add({2, 2, 3, 4}, up, false);
    add({1, 3, 4, 5}, down, true);
    if (mode == Interpolation::kLinear) add({1, 2, 3, 4}, {mode, true, 5, 1, 3.0 / 5, 4}, false);
  }
  return samples;
}

}  // namespace

constinit const OpDef kInterpolate{
    .name = "interpolate",
    .inputs = "x",
    .attrs = attrs_of<InterpolateAttrs>,
    .dtypes = kFloats,
    .infer = infer_interpolate,
    .cpu = kernel::cpu::interpolate,
    .grad = grad_by<kInterpolateBackward>,
    .shard = kShardImage,
    .linear = linear_in({0}),
    .samples = [] { return samples_resize(false); },
    .formula = "x at height x width places, by the nearest pixel or by weighing four",
};

constinit const OpDef kInterpolateBackward{
    .name = "interpolate_backward",
    .inputs = "dy",
    .attrs = attrs_of<InterpolateAttrs>,
    .dtypes = kFloats,
    .infer = infer_interpolate,
    .cpu = kernel::cpu::interpolate_backward,
    .grad = grad_by<kInterpolate>,
    .shard = kShardImage,
    .linear = linear_in({0}),
    .samples = [] { return samples_resize(true); },
    .formula = "dy added to the pixels that it came from",
};

Rows interpolate_rows() {
  static constexpr const OpDef* kRows[] = {&kInterpolate, &kInterpolateBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor interpolate(const Tensor& x, const InterpolateOptions& options) {
  op::need_defined("interpolate", "x", x);
  CHORALE_CHECK(x.dims() == 3 || x.dims() == 4, "[interpolate] x must be [N, C, L] or [N, C, H, W], not ", x.sizes());
  const int64_t spatial = x.dims() - 2;
  const size_t given = options.size.empty() ? options.scale_factor.size() : options.size.size();
  CHORALE_CHECK(options.size.empty() != options.scale_factor.empty(),
                "[interpolate] give a size or a scale_factor, not ", options.size.empty() ? "neither" : "both");
  CHORALE_CHECK(given == 1 || given == static_cast<size_t>(spatial), "[interpolate] ", given,
                " sizes or factors are given for ", spatial, " dimensions");
  CHORALE_CHECK(!options.align_corners || options.mode == Interpolation::kLinear,
                "[interpolate] align_corners has a meaning for linear interpolation only");
  kernel::InterpolateAttrs attrs{options.mode, options.align_corners};
  const auto resize = [&](int64_t dim, int64_t& size, double& ratio) {
    const auto at = given == 1 ? size_t{0} : static_cast<size_t>(dim);
    const auto original = static_cast<double>(x.size(2 + dim));
    if (options.size.empty()) {
      CHORALE_CHECK(options.scale_factor[at] > 0, "[interpolate] a scale_factor must be positive, not ",
                    options.scale_factor[at]);
      size = static_cast<int64_t>(std::floor(original * options.scale_factor[at]));
      ratio = 1 / options.scale_factor[at];
    } else {
      size = options.size[at];
      ratio = original / static_cast<double>(size);
    }
  };
  if (spatial == 2) resize(0, attrs.height, attrs.ratio_h);
  resize(spatial - 1, attrs.width, attrs.ratio_w);
  const op::AsImage as("interpolate", x, spatial);
  return as.back(op::call(op::kInterpolate, attrs, as.image()));
}

}  // namespace chorale
