#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/norm_rules.h"
#include "chorale/op/nn.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::GroupNormAttrs;
using kernel::GroupNormBackwardAttrs;

void check_groups(const InferArgs& args, const Tensor& x, int64_t groups) {
  CHORALE_CHECK(x.dims() >= 2, "[", args.op.name, "] x must be [N, C, …], not ", x.sizes());
  CHORALE_CHECK(groups > 0 && x.size(1) % groups == 0, "[", args.op.name, "] ", x.size(1),
                " channels cannot be divided into ", groups, " equal groups");
}

void infer_group_norm(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const int64_t groups = args.attrs.get<GroupNormAttrs>().groups;
  check_groups(args, x, groups);
  check_parameter(args, "weight", args.in[1], {x.size(1)});
  check_parameter(args, "bias", args.in[2], {x.size(1)});
  describe(out[0], x.sizes(), x.dtype(), x);
  describe(out[1], {x.size(0), groups}, compute_of(x.dtype()), x);
  describe(out[2], {x.size(0), groups}, compute_of(x.dtype()), x);
}

void infer_group_norm_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &x = args.in[1];
  const auto& a = args.attrs.get<GroupNormBackwardAttrs>();
  check_groups(args, x, a.groups);
  check_gradient(args, dy, x);
  check_parameter(args, "mean", args.in[2], {x.size(0), a.groups});
  check_parameter(args, "rstd", args.in[3], {x.size(0), a.groups});
  check_parameter(args, "weight", args.in[4], {x.size(1)});
  describe(out[0], x.sizes(), x.dtype(), x);
  for (size_t i : {1u, 2u}) describe(out[i], {a.affine ? x.size(1) : 0}, compute_of(x.dtype()), x);
}

// x as [N, groups, channels of a group, places], which statistics [N, groups, 1, 1] and parameters [groups, channels,
// 1] broadcast to.
struct Grouped {
  int64_t N, groups, K, area;

  Grouped(const Tensor& x, int64_t group_count)
      : N(x.size(0)), groups(group_count), K(x.size(1) / group_count), area(1) {
    for (int64_t d = 2; d < x.dims(); ++d) area *= x.size(d);
  }
  int64_t count() const { return K * area; }
  Tensor split(const Tensor& x) const { return x.defined() ? reshape(x, {N, groups, K, area}) : x; }
  Tensor statistics(const Tensor& s) const { return s.defined() ? reshape(s, {N, groups, 1, 1}) : s; }
  Tensor parameter(const Tensor& p) const { return p.defined() ? reshape(p, {groups, K, 1}) : p; }
};

Tensors grad_group_norm(const GradArgs& g) {
  const int64_t groups = g.attrs.get<GroupNormAttrs>().groups;
  const Tensor &x = g.in[0], &weight = g.in[1], &mean = g.out[1], &rstd = g.out[2];
  Tensors d(3);
  if (g.dout[0].defined()) {
    const bool affine = g.needs(1) || g.needs(2);
    auto [dx, dweight, dbias] =
        call_many<3>(kGroupNormBackward, GroupNormBackwardAttrs{groups, affine}, g.dout[0], x, mean, rstd, weight);
    d[0] = dx;
    if (g.needs(1)) d[1] = dweight;
    if (g.needs(2)) d[2] = dbias;
  }
  // The statistics have gradients of their own in second derivatives.
  const Grouped grouped(x, groups);
  const auto n = static_cast<double>(grouped.count());
  const auto add_to_dx = [&](const Tensor& more) {
    d[0] = plus(d[0], reshape(expand(more, {grouped.N, groups, grouped.K, grouped.area}), x.sizes()));
  };
  if (g.dout[1].defined()) add_to_dx(grouped.statistics(g.dout[1]) / n);
  if (g.dout[2].defined()) {
    const Tensor centered = grouped.split(x) - grouped.statistics(mean);
    add_to_dx(centered * grouped.statistics(g.dout[2] * pow(rstd, 3)) / -n);
  }
  return d;
}

Tensors grad_group_norm_backward(const GradArgs& g) {
  const auto& a = g.attrs.get<GroupNormBackwardAttrs>();
  const Tensor &x = g.in[1], &weight = g.in[4];
  const Grouped grouped(x, a.groups);
  const NormGradient of{grouped.split(g.in[0]),      grouped.split(x),          grouped.statistics(g.in[2]),
                        grouped.statistics(g.in[3]), grouped.parameter(weight), {2, 3}};
  const Tensor v_weight = a.affine ? grouped.parameter(g.dout[1]) : Tensor();
  const Tensor v_bias = a.affine ? grouped.parameter(g.dout[2]) : Tensor();
  const NormGradient d = differentiate(of, grouped.split(g.dout[0]), v_weight, v_bias);
  const auto back = [](const Tensor& t, const Tensor& like) { return t.defined() ? reshape(t, like.sizes()) : t; };
  Tensors result(5);
  const Shape split{grouped.N, a.groups, grouped.K, grouped.area};
  if (d.dy.defined()) result[0] = reshape(expand(d.dy, split), x.sizes());
  result[1] = back(d.x, x);
  result[2] = back(d.mean, g.in[2]);
  result[3] = back(d.rstd, g.in[3]);
  if (d.weight.defined()) result[4] = reshape(sum(d.weight, {0, 3}), weight.sizes());
  return result;
}

// Samples may be split, and channels between groups: a part then has fewer groups. Operands and results in which
// channels, or groups of them, are dimension `dim`.
std::string samples_of(int64_t dims) {
  std::string x = keep_whole(letters(dims));
  x[0] = 'a';
  return x;
}
constexpr Placement kByGroup = Placement::shard(1), kByChannel = Placement::shard(0);

void ways_group_norm(const ShardCall& call, ShardWays& ways) {
  const std::string x = samples_of(call.dims(0));
  ways.split(join({x, "B", "B"}, {x, "aZ", "aZ"}));
  if (can_split(call.attrs.get<GroupNormAttrs>().groups, call.shards, Parts::kEqual)) {
    ways.add({kByGroup, kByChannel, kByChannel}, {kByGroup, kByGroup, kByGroup});
  }
}
Attrs local_group_norm(const ShardCall& call, std::span<const Part>, std::span<const Part> out) {
  auto a = call.attrs.get<GroupNormAttrs>();
  a.groups = out[1].sizes[1];
  return a;
}

void ways_group_norm_backward(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<GroupNormBackwardAttrs>();
  const std::string x = samples_of(call.dims(0)), parameter = a.affine ? "B" : "Y";
  ways.split(join({x, x, "aZ", "aZ", "B"}, {x, parameter, parameter}), Reduce::kSum);
  if (can_split(a.groups, call.shards, Parts::kEqual)) {
    ways.add({kByGroup, kByGroup, kByGroup, kByGroup, kByChannel}, {kByGroup, kByChannel, kByChannel});
  }
}
Attrs local_group_norm_backward(const ShardCall& call, std::span<const Part> in, std::span<const Part>) {
  auto a = call.attrs.get<GroupNormBackwardAttrs>();
  a.groups = in[2].sizes[1];
  return a;
}

}  // namespace

constinit const OpDef kGroupNorm{
    .name = "group_norm",
    .inputs = "x, weight?, bias?",
    .outputs = 3,
    .attrs = attrs_of<GroupNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_group_norm,
    .cpu = kernel::cpu::group_norm,
    .grad = grad_group_norm,
    .shard = {.ways = ways_group_norm, .local = local_group_norm},
    .saves = {.in = {0, 1}, .out = {1, 2}},
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 4, 3}), sample({4}, 1), sample({4}, 2)}, GroupNormAttrs{2, 1e-5}},
              {{sample({2, 6}, 3), sample({6}, 4), Tensor()}, GroupNormAttrs{3, 0.1}},
              {{sample({2, 3, 2, 3}, 5), Tensor(), Tensor()}, GroupNormAttrs{1, 1e-5}},
              {{sample({1, 3, 2, 4}, 6), sample({3}, 7), sample({3}, 8)}, GroupNormAttrs{3, 1e-5}}};
    },
    .formula = "y = (x - mean) * rstd * weight + bias over groups of channels",
};

constinit const OpDef kGroupNormBackward{
    .name = "group_norm_backward",
    .inputs = "dy, x, mean, rstd, weight?",
    .outputs = 3,
    .attrs = attrs_of<GroupNormBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_group_norm_backward,
    .cpu = kernel::cpu::group_norm_backward,
    .grad = grad_group_norm_backward,
    .shard = {.ways = ways_group_norm_backward, .local = local_group_norm_backward},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = []() -> std::vector<Sample> {
      return {
          {{sample({2, 4, 2}), sample({2, 4, 2}, 1), sample({2, 2}, 2), sample({2, 2}, 3, 0.5, 2), sample({4}, 4)},
           GroupNormBackwardAttrs{2, true}},
          {{sample({2, 3, 2, 2}, 5), sample({2, 3, 2, 2}, 6), sample({2, 1}, 7), sample({2, 1}, 8, 0.5, 2), Tensor()},
           GroupNormBackwardAttrs{1, false}}};
    },
    .formula = "g = dy * weight, z = (x - mean) * rstd, dx = (g - avg(g) - z * avg(g * z)) * rstd",
};

Rows group_norm_rows() {
  static constexpr const OpDef* kRows[] = {&kGroupNorm, &kGroupNormBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor group_norm(const Tensor& x, int64_t groups, const Tensor& weight, const Tensor& bias, double eps) {
  return op::call_many<3>(op::kGroupNorm, kernel::GroupNormAttrs{groups, eps}, x, weight, bias)[0];
}

}  // namespace chorale
