// Three rows that are each other's gradients. y = conv(x, w) is linear in x and in w; written as three tensors that
// meet in one sum, each row computes one of them from the other two.
#include "chorale/op/convolution.h"

#include "chorale/kernel/cpu/convolution/convolution.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

using kernel::ConvolutionAttrs;

size_t spatial_of(const Tensor& x) { return x.sizes().size() - 2; }

// The attributes for another of the three rows: the sizes of its result are known.
ConvolutionAttrs with_sizes(ConvolutionAttrs attrs, const Shape& shape) {
  attrs.result = std::span<const int64_t>(shape.data() + 2, shape.size() - 2);
  return attrs;
}
ConvolutionAttrs without_sizes(ConvolutionAttrs attrs) {
  attrs.result = {};
  return attrs;
}

void check_operands(const InferArgs& args, const Tensor& a, const Tensor& b, const char* names) {
  CHORALE_CHECK(a.dims() >= 3 && a.dims() <= 5 && a.dims() == b.dims(), "[", args.op.name, "] ", names,
                " must both have 3, 4 or 5 dimensions, found ", a.sizes(), " and ", b.sizes());
  CHORALE_CHECK(a.dtype() == b.dtype(), "[", args.op.name, "] dtypes differ: ", a.dtype(), " and ", b.dtype(),
                "; cast one side");
  const auto& attrs = args.attrs.get<ConvolutionAttrs>();
  const size_t spatial = spatial_of(a);
  CHORALE_CHECK(attrs.stride.size() == spatial && attrs.padding.size() == spatial && attrs.dilation.size() == spatial,
                "[", args.op.name, "] stride, padding and dilation must have ", spatial, " entries each");
  for (size_t d = 0; d < spatial; ++d) {
    CHORALE_CHECK(attrs.stride[d] > 0 && attrs.padding[d] >= 0 && attrs.dilation[d] > 0, "[", args.op.name, "] stride ",
                  attrs.stride[d], " and dilation ", attrs.dilation[d], " must be positive, padding ", attrs.padding[d],
                  " not negative");
  }
  CHORALE_CHECK(attrs.groups > 0, "[", args.op.name, "] groups must be positive, not ", attrs.groups);
}

void set_result(OutSpec& out, Shape sizes, const Tensor& like) {
  out.dtype = like.dtype();
  out.device = like.device();
  if (!like.is_contiguous() && like.is_channels_last()) {
    out.strides = channels_last_strides(sizes);
    out.strided = true;
  }
  out.sizes = std::move(sizes);
}

void infer_convolution(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &w = args.in[1], &bias = args.in[2];
  check_operands(args, x, w, "x and weight");
  const auto& attrs = args.attrs.get<ConvolutionAttrs>();
  const size_t spatial = spatial_of(x);
  CHORALE_CHECK(x.size(1) == w.size(1) * attrs.groups && w.size(0) % attrs.groups == 0, "[convolution] x ", x.sizes(),
                " has ", x.size(1), " channels; weight ", w.sizes(), " with ", attrs.groups, " groups takes ",
                w.size(1) * attrs.groups, " and gives ", w.size(0));
  if (bias.defined()) {
    CHORALE_CHECK(bias.dims() == 1 && bias.size(0) == w.size(0) && bias.dtype() == x.dtype(),
                  "[convolution] bias must be ", x.dtype(), " [", w.size(0), "], found ", bias.dtype(), " ",
                  bias.sizes());
  }
  Shape sizes{x.size(0), w.size(0)};
  for (size_t d = 0; d < spatial; ++d) {
    const int64_t window = attrs.dilation[d] * (w.sizes()[d + 2] - 1) + 1;
    const int64_t padded = x.sizes()[d + 2] + 2 * attrs.padding[d];
    CHORALE_CHECK(window >= 1 && padded >= window, "[convolution] the kernel covers ", window,
                  " elements in spatial dimension ", d, ", but x ", x.sizes(), " padded has ", padded);
    sizes.push_back((padded - window) / attrs.stride[d] + 1);
  }
  set_result(out[0], std::move(sizes), x);
}

void infer_transpose(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &y = args.in[0], &w = args.in[1];
  check_operands(args, y, w, "y and weight");
  const auto& attrs = args.attrs.get<ConvolutionAttrs>();
  const size_t spatial = spatial_of(y);
  CHORALE_CHECK(y.size(1) == w.size(0) && w.size(0) % attrs.groups == 0, "[convolution_transpose] y ", y.sizes(),
                " has ", y.size(1), " channels; weight ", w.sizes(), " takes ", w.size(0), " in ", attrs.groups,
                " groups");
  CHORALE_CHECK(attrs.result.size() == spatial, "[convolution_transpose] the sizes of the result are missing");
  Shape sizes{y.size(0), w.size(1) * attrs.groups};
  for (size_t d = 0; d < spatial; ++d) {
    const int64_t window = attrs.dilation[d] * (w.sizes()[d + 2] - 1) + 1;
    const int64_t size = attrs.result[d];
    const int64_t padded = size + 2 * attrs.padding[d];
    CHORALE_CHECK(size >= 0 && padded >= window && (padded - window) / attrs.stride[d] + 1 == y.sizes()[d + 2],
                  "[convolution_transpose] a result of ", size, " elements in spatial dimension ", d,
                  " does not fit y ", y.sizes(), " with weight ", w.sizes(), ", stride ", attrs.stride[d],
                  " and padding ", attrs.padding[d]);
    sizes.push_back(size);
  }
  set_result(out[0], std::move(sizes), y);
}

void infer_weight(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &y = args.in[1];
  check_operands(args, x, y, "x and y");
  const auto& attrs = args.attrs.get<ConvolutionAttrs>();
  const size_t spatial = spatial_of(x);
  CHORALE_CHECK(x.size(0) == y.size(0) && x.size(1) % attrs.groups == 0 && y.size(1) % attrs.groups == 0 &&
                    attrs.result.size() == spatial,
                "[convolution_weight] x ", x.sizes(), " and y ", y.sizes(), " do not fit in ", attrs.groups, " groups");
  Shape sizes{y.size(1), x.size(1) / attrs.groups};
  for (size_t d = 0; d < spatial; ++d) {
    const int64_t window = attrs.dilation[d] * (attrs.result[d] - 1) + 1;
    const int64_t padded = x.sizes()[d + 2] + 2 * attrs.padding[d];
    CHORALE_CHECK(window >= 1 && padded >= window && (padded - window) / attrs.stride[d] + 1 == y.sizes()[d + 2],
                  "[convolution_weight] a kernel of ", attrs.result[d], " elements in spatial dimension ", d,
                  " does not lead from x ", x.sizes(), " to y ", y.sizes());
    sizes.push_back(attrs.result[d]);
  }
  out[0].sizes = std::move(sizes);
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

// Windows overlap, so only samples n and channels i (of x) and o (of y) can be split; `in` and `out` are their letters.
// In groups, channels meet only those of their own group: a part has whole groups, fewer of them. The dimensions of
// operands and result that groups divide are `grouped` and `grouped_out`.
void split_channels(const ShardCall& call, ShardWays& ways, std::vector<std::string> in, std::vector<std::string> out,
                    std::initializer_list<int64_t> grouped, int64_t grouped_out) {
  const int64_t groups = call.attrs.get<ConvolutionAttrs>().groups;
  const std::string spatial = keep_whole(letters(call.dims(0) - 2));
  const auto complete = [&](std::string& labels) {
    if (groups > 1) {
      for (char& letter : labels)
        letter = letter == 'n' || letter == '+' ? letter : static_cast<char>(std::toupper(letter));
    }
    if (labels[0] != '+') labels += spatial;  // the bias has no places
  };
  for (std::string& labels : in) complete(labels);
  for (std::string& labels : out) complete(labels);
  ways.split(join(in, out), Reduce::kSum);
  if (groups > 1 && can_split(groups, call.shards, Parts::kEqual)) {
    std::vector<Placement> placements;
    placements.reserve(grouped.size());
    for (int64_t dim : grouped) placements.push_back(Placement::shard(dim));
    ways.add(std::move(placements), {Placement::shard(grouped_out)});
  }
}
Attrs local_groups(const ShardCall& call, std::span<const Part> in, std::span<const Part>) {
  auto attrs = call.attrs.get<ConvolutionAttrs>();
  // One group stays one, also of a part of the channels.
  if (attrs.groups > 1) attrs.groups = attrs.groups * in[0].sizes[1] / call.in[0].size(1);
  return attrs;
}

Sample two_d(const Shape& x, const Shape& w, bool bias, SpatialList stride, SpatialList padding, SpatialList dilation,
             int64_t groups = 1) {
  return {.in = {sample(x), sample(w, 1), bias ? sample({w[0]}, 2) : Tensor()},
          .attrs = ConvolutionAttrs{stride, padding, dilation, {}, groups}};
}

}  // namespace

constexpr OpDef kConvolution{
    .name = "convolution",
    .inputs = "x, weight, bias?",
    .attrs = attrs_of<ConvolutionAttrs>,
    .dtypes = kFloats,
    .infer = infer_convolution,
    .cpu = kernel::cpu::convolution,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &x = g.in[0], &w = g.in[1], &dy = g.dout[0];
      const auto& attrs = g.attrs.get<ConvolutionAttrs>();
      Tensors din(3);
      if (g.needs(0)) din[0] = call(kConvolutionTranspose, with_sizes(attrs, x.sizes()), dy, w);
      if (g.needs(1)) din[1] = emit(g, 1, kConvolutionWeight, with_sizes(attrs, w.sizes()), x, dy);
      if (g.needs(2)) {
        IntList dims{0};
        for (int64_t d = 2; d < dy.dims(); ++d) dims.values[dims.count++] = d;
        din[2] = sum(dy, dims);
      }
      return din;
    },
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    split_channels(call, ways, {"ni", "oi", "+o"}, {"no"}, {1, 0, 0}, 1);
                  },
              .local = local_groups},
    .linear = linear_terms({{0, 1}, {2}}),
    .saves = saves_in({0, 1}),
    .autocast = Cast::kLower,
    .samples =
        [] {
          return std::vector<Sample>{two_d({2, 3, 5, 4}, {2, 3, 3, 2}, true, {1, 1}, {1, 0}, {1, 1}),
                                     two_d({1, 4, 6, 5}, {4, 2, 2, 2}, false, {2, 1}, {0, 1}, {1, 2}, 2),
                                     two_d({2, 2, 7}, {4, 1, 3}, true, 2, 1, 1, 2),
                                     two_d({1, 2, 3, 4, 3}, {2, 2, 2, 2, 2}, true, {1, 2, 1}, {0, 1, 0}, {1, 1, 1})};
        },
    .formula = "y[n][o][p] = bias[o] + sum over i, k of x[n][i][p * stride + k * dilation - padding] w[o][i][k]",
};

constexpr OpDef kConvolutionTranspose{
    .name = "convolution_transpose",
    .inputs = "y, weight",
    .attrs = attrs_of<ConvolutionAttrs>,
    .dtypes = kFloats,
    .infer = infer_transpose,
    .cpu = kernel::cpu::convolution_transpose,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &y = g.in[0], &w = g.in[1], &dx = g.dout[0];
      const ConvolutionAttrs attrs = without_sizes(g.attrs.get<ConvolutionAttrs>());
      Tensors din(2);
      if (g.needs(0)) din[0] = call(kConvolution, attrs, dx, w, Tensor{});
      if (g.needs(1)) din[1] = emit(g, 1, kConvolutionWeight, with_sizes(attrs, w.sizes()), dx, y);
      return din;
    },
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    split_channels(call, ways, {"no", "oi"}, {"ni"}, {1, 0}, 1);
                  },
              .local = local_groups},
    .linear = linear_in({0, 1}),
    .saves = saves_in({0, 1}),
    .autocast = Cast::kLower,
    .samples =
        [] {
          return std::vector<Sample>{
              {.in = {sample({2, 2, 5, 3}), sample({2, 3, 3, 2}, 1)},
               .attrs = ConvolutionAttrs{{1, 1}, {1, 0}, {1, 1}, {5, 4}, 1}},
              {.in = {sample({1, 4, 3, 3}), sample({4, 2, 2, 2}, 1)},
               .attrs = ConvolutionAttrs{{2, 1}, {0, 1}, {1, 2}, {6, 3}, 2}},
              {.in = {sample({2, 3, 4}), sample({3, 2, 3}, 1)}, .attrs = ConvolutionAttrs{2, 1, 1, 8, 1}}};
        },
    .formula = "x[n][i][p * stride + k * dilation - padding] += y[n][o][p] w[o][i][k]",
};

constexpr OpDef kConvolutionWeight{
    .name = "convolution_weight",
    .inputs = "x, y",
    .attrs = attrs_of<ConvolutionAttrs>,
    .dtypes = kFloats,
    .infer = infer_weight,
    .cpu = kernel::cpu::convolution_weight,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &x = g.in[0], &y = g.in[1], &dw = g.dout[0];
      const ConvolutionAttrs attrs = without_sizes(g.attrs.get<ConvolutionAttrs>());
      Tensors din(2);
      if (g.needs(0)) din[0] = call(kConvolutionTranspose, with_sizes(attrs, x.sizes()), y, dw);
      if (g.needs(1)) din[1] = call(kConvolution, attrs, x, dw, Tensor{});
      return din;
    },
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    split_channels(call, ways, {"ni", "no"}, {"oi"}, {1, 1}, 0);
                  },
              .local = local_groups},
    .linear = linear_in({0, 1}),
    .saves = saves_in({0, 1}),
    .autocast = Cast::kLower,
    .samples =
        [] {
          return std::vector<Sample>{
              {.in = {sample({2, 3, 5, 4}), sample({2, 2, 5, 3}, 1)},
               .attrs = ConvolutionAttrs{{1, 1}, {1, 0}, {1, 1}, {3, 2}, 1}},
              {.in = {sample({2, 2, 7}), sample({2, 4, 4}, 1)}, .attrs = ConvolutionAttrs{2, 1, 1, 3, 2}}};
        },
    .formula = "w[o][i][k] = sum over n, p of x[n][i][p * stride + k * dilation - padding] y[n][o][p]",
};

namespace {
constexpr const OpDef* kConvolutionRows[] = {&kConvolution, &kConvolutionTranspose, &kConvolutionWeight};
}
Rows convolution_rows() { return kConvolutionRows; }

}  // namespace op

namespace {

SpatialList per_dimension(const char* name, const char* what, const IntList& list, size_t spatial) {
  CHORALE_CHECK(list.size() == 1 || list.size() == spatial, "[", name, "] ", what, " must have 1 or ", spatial,
                " entries, not ", list.size());
  if (list.size() == spatial) return list.span();
  SpatialList full;
  for (size_t d = 0; d < spatial; ++d) full.values[full.count++] = list[0];
  return full;
}

// x with a batch, and whether it had none.
std::pair<Tensor, bool> batched(const char* name, const Tensor& x, size_t spatial) {
  const auto dims = static_cast<int64_t>(spatial) + 2;
  CHORALE_CHECK(x.dims() == dims || x.dims() == dims - 1, "[", name, "] x must have ", dims, " dimensions, or ",
                dims - 1, " without a batch, found ", x.sizes());
  return x.dims() == dims ? std::pair(x, false) : std::pair(unsqueeze(x, 0), true);
}

Tensor conv(const char* name, size_t spatial, const Tensor& x, const Tensor& weight, const Tensor& bias,
            const IntList& stride, const IntList& padding, const IntList& dilation, int64_t groups) {
  op::need_defined(name, "x", x);
  op::need_defined(name, "weight", weight);
  const auto [full, single] = batched(name, x, spatial);
  const op::ConvolutionAttrs attrs{.stride = per_dimension(name, "stride", stride, spatial),
                                   .padding = per_dimension(name, "padding", padding, spatial),
                                   .dilation = per_dimension(name, "dilation", dilation, spatial),
                                   .result = {},
                                   .groups = groups};
  const Tensor y = op::call(op::kConvolution, attrs, full, weight, bias);
  return single ? squeeze(y, {0}) : y;
}

Tensor conv_transpose(const char* name, size_t spatial, const Tensor& x, const Tensor& weight, const Tensor& bias,
                      const IntList& stride, const IntList& padding, const IntList& output_padding, int64_t groups,
                      const IntList& dilation) {
  op::need_defined(name, "x", x);
  op::need_defined(name, "weight", weight);
  const auto [full, single] = batched(name, x, spatial);
  CHORALE_CHECK(weight.dims() == full.dims(), "[", name, "] weight must have ", full.dims(), " dimensions, found ",
                weight.sizes());
  const SpatialList strides = per_dimension(name, "stride", stride, spatial),
                    pads = per_dimension(name, "padding", padding, spatial);
  const SpatialList extra = per_dimension(name, "output_padding", output_padding, spatial),
                    dilations = per_dimension(name, "dilation", dilation, spatial);
  SpatialList sizes, inside = pads;
  // The row takes an output padding below its stride. With more, it computes without paddings, and both are cut off or
  // put on afterwards, as pad() takes them: the last dimension first.
  IntList afterwards;
  bool is_beyond = false;
  for (size_t d = spatial; d-- > 0;) {
    const bool beyond = extra[d] >= strides[d];
    if (beyond) inside.values[d] = 0;
    afterwards.values[afterwards.count++] = beyond ? -pads[d] : 0;
    afterwards.values[afterwards.count++] = beyond ? extra[d] - pads[d] : 0;
    is_beyond = is_beyond || beyond;
  }
  for (size_t d = 0; d < spatial; ++d) {
    CHORALE_CHECK(extra[d] >= 0 && extra[d] < std::max(strides[d], dilations[d]), "[", name, "] output_padding ",
                  extra[d], " must be smaller than the stride ", strides[d], " or the dilation ", dilations[d]);
    sizes.values[sizes.count++] = (full.sizes()[d + 2] - 1) * strides[d] - 2 * inside[d] +
                                  dilations[d] * (weight.sizes()[d + 2] - 1) + 1 +
                                  (extra[d] < strides[d] ? extra[d] : 0);
  }
  Tensor y = op::call(op::kConvolutionTranspose, op::ConvolutionAttrs{strides, inside, dilations, sizes, groups}, full,
                      weight);
  if (is_beyond) y = pad(y, afterwards);
  if (bias.defined()) {
    IntList shape{-1};
    for (size_t d = 0; d < spatial; ++d) shape.values[shape.count++] = 1;
    y = add(y, view(bias, shape));
  }
  return single ? squeeze(y, {0}) : y;
}

}  // namespace

#define CHORALE_CONV(D)                                                                                         \
  Tensor conv##D##d(const Tensor& x, const Tensor& weight, const Tensor& bias, const IntList& stride,           \
                    const IntList& padding, const IntList& dilation, int64_t groups) {                          \
    return conv("conv" #D "d", D, x, weight, bias, stride, padding, dilation, groups);                          \
  }                                                                                                             \
  Tensor conv_transpose##D##d(const Tensor& x, const Tensor& weight, const Tensor& bias, const IntList& stride, \
                              const IntList& padding, const IntList& output_padding, int64_t groups,            \
                              const IntList& dilation) {                                                        \
    return conv_transpose("conv_transpose" #D "d", D, x, weight, bias, stride, padding, output_padding, groups, \
                          dilation);                                                                            \
  }
CHORALE_CONV(1)
CHORALE_CONV(2)
CHORALE_CONV(3)

}  // namespace chorale
