#include "chorale/kernel/cpu/image/pool.h"

#include "chorale/kernel/pool_window.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/image_rules.h"
#include "chorale/op/index.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::AreaAttrs;
using kernel::AvgPoolAttrs;
using kernel::AvgPoolBackwardAttrs;
using kernel::PoolAttrs;
using kernel::PoolSide;

// The number of windows along a side, checked.
int64_t windows(const InferArgs& args, const PoolSide& s, bool ceil_mode, const char* along, int64_t size) {
  CHORALE_CHECK(s.kernel > 0 && s.stride > 0 && s.dilation > 0, "[", args.op.name, "] kernel ", s.kernel, ", stride ",
                s.stride, " and dilation ", s.dilation, " of the ", along, " must be positive");
  CHORALE_CHECK(s.padding >= 0 && s.padding <= s.reach() / 2, "[", args.op.name, "] padding ", s.padding, " of the ",
                along, " must be at most half of the window, ", s.reach());
  const int64_t count = s.outputs(size, ceil_mode);
  CHORALE_CHECK(count > 0, "[", args.op.name, "] a window of ", s.reach(), " does not fit into a ", along, " of ", size,
                " with padding ", s.padding);
  return count;
}

template <class A>
void check_lists(const InferArgs& args, const A& a) {
  CHORALE_CHECK(a.kernel.size() == 2 && a.stride.size() == 2 && a.padding.size() == 2, "[", args.op.name,
                "] kernel, stride and padding must have 2 entries each");
}

void infer_max_pool(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<PoolAttrs>();
  check_image(args, x);
  check_lists(args, a);
  const kernel::PoolWindow window = kernel::window_of(a);
  const int64_t height = windows(args, window.height, a.ceil_mode, "height", x.size(2)),
                width = windows(args, window.width, a.ceil_mode, "width", x.size(3));
  describe_image(out[0], x, height, width, x.dtype());
  describe_image(out[1], x, height, width, DType::kI64);
}

void infer_avg_pool(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<AvgPoolAttrs>();
  check_image(args, x);
  check_lists(args, a);
  const kernel::PoolWindow window = kernel::window_of(a);
  const int64_t height = windows(args, window.height, a.ceil_mode, "height", x.size(2)),
                width = windows(args, window.width, a.ceil_mode, "width", x.size(3));
  describe_image(out[0], x, height, width, x.dtype());
}

void infer_avg_pool_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& dy = args.in[0];
  const auto& a = args.attrs.get<AvgPoolBackwardAttrs>();
  check_image(args, dy);
  check_lists(args, a);
  const kernel::PoolWindow window = kernel::window_of(a);
  const int64_t height = windows(args, window.height, a.ceil_mode, "height", a.height),
                width = windows(args, window.width, a.ceil_mode, "width", a.width);
  CHORALE_CHECK(dy.size(2) == height && dy.size(3) == width, "[avg_pool_backward] an image of ", a.height, " x ",
                a.width, " has ", height, " x ", width, " windows, but the gradient is ", dy.sizes());
  describe_image(out[0], dy, a.height, a.width, dy.dtype());
}

void infer_adaptive(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<AreaAttrs>();
  check_image(args, x);
  CHORALE_CHECK(a.height > 0 && a.width > 0, "[", args.op.name, "] the result cannot have the size ", a.height, " x ",
                a.width);
  CHORALE_CHECK(x.size(2) > 0 && x.size(3) > 0, "[", args.op.name, "] x has no places: ", x.sizes());
  describe_image(out[0], x, a.height, a.width, x.dtype());
  if (out.size() > 1) describe_image(out[1], x, a.height, a.width, DType::kI64);
}

void infer_max_pool_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &indices = args.in[1];
  CHORALE_CHECK(indices.dtype() == DType::kI64 && indices.sizes() == dy.sizes(),
                "[max_pool_backward] indices must be i64 of shape ", dy.sizes(), ", not ", indices.dtype(), " ",
                indices.sizes());
  infer_adaptive(args, out);
}

// The gradient of both kinds of max pooling.
Tensors grad_max_pool(const GradArgs& g) {
  return {call(kMaxPoolBackward, AreaAttrs{g.shape(0)[2], g.shape(0)[3]}, g.dout[0], g.out[1])};
}

}  // namespace

constinit const OpDef kMaxPool{
    .name = "max_pool",
    .inputs = "x",
    .outputs = 2,
    .attrs = attrs_of<PoolAttrs>,
    .dtypes = kFloats,
    .infer = infer_max_pool,
    .cpu = kernel::cpu::max_pool,
    .grad = grad_max_pool,
    .shard = kShardImageAndIndices,
    .saves = {.out = {1}},
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 4, 4})}, PoolAttrs{{2, 2}, {2, 2}, {0, 0}, {1, 1}}},
              {{sample({1, 2, 5, 6}, 1)}, PoolAttrs{{3, 2}, {2, 1}, {1, 1}, {1, 1}, true}},
              {{sample({1, 1, 7, 7}, 2)}, PoolAttrs{{2, 3}, {1, 3}, {1, 2}, {3, 2}}},
              {{permute(sample({2, 4, 5, 3}, 3), {0, 3, 1, 2})}, PoolAttrs{{2, 2}, {2, 2}, {0, 0}, {1, 1}}},
              {{sample({1, 1, 3, 70}, 4)}, PoolAttrs{{2, 3}, {1, 2}, {0, 1}, {1, 1}}}};
    },
    .formula = "the largest element of each window, and where it is",
};

constinit const OpDef kAdaptiveMaxPool{
    .name = "adaptive_max_pool",
    .inputs = "x",
    .outputs = 2,
    .attrs = attrs_of<AreaAttrs>,
    .dtypes = kFloats,
    .infer = infer_adaptive,
    .cpu = kernel::cpu::adaptive_max_pool,
    .grad = grad_max_pool,
    .shard = kShardImageAndIndices,
    .saves = {.out = {1}},
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 5, 4})}, AreaAttrs{3, 2}},
              {{permute(sample({1, 4, 5, 3}, 1), {0, 3, 1, 2})}, AreaAttrs{1, 1}},
              {{sample({1, 2, 2, 3}, 2)}, AreaAttrs{4, 3}}};
    },
    .formula = "the largest elements of height x width windows, and where they are",
};

constinit const OpDef kMaxPoolBackward{
    .name = "max_pool_backward",
    .inputs = "dy, indices",
    .attrs = attrs_of<AreaAttrs>,
    .dtypes = kFloats,
    .infer = infer_max_pool_backward,
    .cpu = kernel::cpu::max_pool_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {reshape(gather(flatten(g.dout[0], 2), 2, flatten(g.in[1], 2)), g.in[1].sizes()), Tensor()};
    },
    .shard = {.labels = "ncHW,ncHW->ncYX"},
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {
          {{sample({2, 2, 2, 3}), sample_ints({2, 2, 2, 3}, 0, 20, 1)}, AreaAttrs{4, 5}},
          {{permute(sample({1, 2, 2, 3}, 2), {0, 3, 1, 2}), permute(sample_ints({1, 2, 2, 3}, 0, 9, 3), {0, 3, 1, 2})},
           AreaAttrs{3, 3}}};
    },
    .formula = "dy added up at the indices",
};

constinit const OpDef kAvgPool{
    .name = "avg_pool",
    .inputs = "x",
    .attrs = attrs_of<AvgPoolAttrs>,
    .dtypes = kFloats,
    .infer = infer_avg_pool,
    .cpu = kernel::cpu::avg_pool,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<AvgPoolAttrs>();
      return {call(kAvgPoolBackward,
                   AvgPoolBackwardAttrs{a.kernel, a.stride, a.padding, a.ceil_mode, a.count_include_pad, a.divisor,
                                        g.shape(0)[2], g.shape(0)[3]},
                   g.dout[0])};
    },
    .shard = kShardImage,
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 4, 4})}, AvgPoolAttrs{{2, 2}, {2, 2}, {0, 0}}},
              {{sample({1, 2, 5, 6}, 1)}, AvgPoolAttrs{{3, 2}, {2, 1}, {1, 1}, true, true}},
              {{sample({1, 2, 5, 6}, 2)}, AvgPoolAttrs{{3, 3}, {2, 2}, {1, 1}, true, false}},
              {{permute(sample({2, 4, 5, 3}, 3), {0, 3, 1, 2})}, AvgPoolAttrs{{2, 3}, {1, 2}, {1, 1}, false, true, 5}},
              {{sample({1, 1, 3, 70}, 4)}, AvgPoolAttrs{{2, 3}, {1, 2}, {0, 1}}}};
    },
    .formula = "the mean of each window",
};

constinit const OpDef kAvgPoolBackward{
    .name = "avg_pool_backward",
    .inputs = "dy",
    .attrs = attrs_of<AvgPoolBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_avg_pool_backward,
    .cpu = kernel::cpu::avg_pool_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      const auto& a = g.attrs.get<AvgPoolBackwardAttrs>();
      return {call(kAvgPool, AvgPoolAttrs{a.kernel, a.stride, a.padding, a.ceil_mode, a.count_include_pad, a.divisor},
                   g.dout[0])};
    },
    .shard = kShardImage,
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({1, 2, 3, 3})}, AvgPoolBackwardAttrs{{2, 2}, {1, 1}, {0, 0}, false, true, 0, 4, 4}},
              {{permute(sample({1, 2, 2, 3}), {0, 3, 1, 2})},
               AvgPoolBackwardAttrs{{3, 3}, {2, 2}, {1, 1}, false, false, 0, 4, 3}}};
    },
    .formula = "dy spread over each window",
};

constinit const OpDef kAdaptiveAvgPool{
    .name = "adaptive_avg_pool",
    .inputs = "x",
    .attrs = attrs_of<AreaAttrs>,
    .dtypes = kFloats,
    .infer = infer_adaptive,
    .cpu = kernel::cpu::adaptive_avg_pool,
    .grad = [](const GradArgs& g) -> Tensors {
      const Shape x = g.shape(0);
      const auto& a = g.attrs.get<AreaAttrs>();
      // An expanded number has no order in memory, where a tensor of x's sizes would have to choose one.
      if (a.height == 1 && a.width == 1) return {expand(g.dout[0] * (1.0 / static_cast<double>(x[2] * x[3])), x)};
      return {call(kAdaptiveAvgPoolBackward, AreaAttrs{x[2], x[3]}, g.dout[0])};
    },
    .shard = kShardImage,
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 5, 4})}, AreaAttrs{3, 2}},
              {{permute(sample({1, 4, 5, 3}, 1), {0, 3, 1, 2})}, AreaAttrs{1, 1}},
              {{sample({1, 2, 2, 3}, 2)}, AreaAttrs{4, 3}},
              {{sample({1, 1, 2, 40}, 3)}, AreaAttrs{1, 2}}};
    },
    .formula = "the means of height x width windows",
};

constinit const OpDef kAdaptiveAvgPoolBackward{
    .name = "adaptive_avg_pool_backward",
    .inputs = "dy",
    .attrs = attrs_of<AreaAttrs>,
    .dtypes = kFloats,
    .infer = infer_adaptive,
    .cpu = kernel::cpu::adaptive_avg_pool_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kAdaptiveAvgPool, AreaAttrs{g.shape(0)[2], g.shape(0)[3]}, g.dout[0])};
    },
    .shard = kShardImage,
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 2, 3, 2})}, AreaAttrs{5, 4}},
              {{permute(sample({1, 2, 2, 3}), {0, 3, 1, 2})}, AreaAttrs{3, 5}}};
    },
    .formula = "dy spread over height x width windows",
};

Rows pool_rows() {
  static constexpr const OpDef* kRows[] = {&kMaxPool,         &kAdaptiveMaxPool, &kMaxPoolBackward,        &kAvgPool,
                                           &kAvgPoolBackward, &kAdaptiveAvgPool, &kAdaptiveAvgPoolBackward};
  return kRows;
}

}  // namespace chorale::op
