#include "chorale/kernel/cpu/product/attention.h"

#include <cmath>
#include <limits>

#include "chorale/kernel/cpu/joined.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/norm_rules.h"
#include "chorale/op/joined.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/nn.h"
#include "chorale/op/product.h"
#include "chorale/op/random.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::AttentionAttrs;

Shape scores_shape(const Tensor& q, const Tensor& k) {
  Shape sizes = q.sizes();
  sizes.back() = k.size(-2);
  return sizes;
}

void check_heads(const InferArgs& args, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
  const auto& a = args.attrs.get<AttentionAttrs>();
  const char* name = args.op.name;
  CHORALE_CHECK(
      q.dims() >= 2 && k.dims() == q.dims() && v.dims() == q.dims() && k.dtype() == q.dtype() && v.dtype() == q.dtype(),
      "[", name, "] q, k and v must have one dtype and number of dimensions, at least 2; they are ", q.dtype(), " ",
      q.sizes(), ", ", k.dtype(), " ", k.sizes(), " and ", v.dtype(), " ", v.sizes());
  CHORALE_CHECK(k.size(-1) == q.size(-1), "[", name, "] q and k differ in depth: ", q.sizes(), " and ", k.sizes());
  CHORALE_CHECK(v.size(-2) == k.size(-2), "[", name, "] k and v differ in length: ", k.sizes(), " and ", v.sizes());
  for (int64_t d = 0; d + 2 < q.dims(); ++d) {
    const bool heads = d + 3 == q.dims() && a.grouped;
    const bool fits = heads ? k.size(d) > 0 && q.size(d) % k.size(d) == 0 : q.size(d) == k.size(d);
    CHORALE_CHECK(fits && v.size(d) == k.size(d), "[", name, "] dimension ", d,
                  " of q, k and v does not fit: ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                  a.grouped ? "" : "; are heads grouped? Then set enable_gqa");
  }
  if (mask.defined()) {
    CHORALE_CHECK(mask.dtype() == DType::kBool || is_floating(mask.dtype()), "[", name,
                  "] a mask is bool or floating, not ", mask.dtype());
    const Shape scores = scores_shape(q, k);
    bool fits = mask.dims() <= q.dims();
    for (int64_t d = 1; fits && d <= mask.dims(); ++d)
      fits = mask.size(-d) == 1 || mask.size(-d) == scores[scores.size() - static_cast<size_t>(d)];
    CHORALE_CHECK(fits, "[", name, "] a mask of shape ", mask.sizes(), " does not broadcast to the scores, ", scores);
  }
  CHORALE_CHECK(!mask.defined() || !a.causal, "[", name, "] a mask and causal attention exclude each other");
  CHORALE_CHECK(a.dropout_p >= 0 && a.dropout_p <= 1, "[", name, "] dropout_p must lie between 0 and 1, not be ",
                a.dropout_p);
}

// New memory of this shape; heads inside lengths, as like's are, or row-major.
void describe_like(OutSpec& out, const Shape& sizes, const Tensor& like) {
  describe(out, sizes, like.dtype(), like);
  const size_t dims = sizes.size();
  if (dims < 3 || like.stride(-3) >= like.stride(-2)) return;
  Shape swapped = sizes;
  std::swap(swapped[dims - 3], swapped[dims - 2]);
  out.strides = contiguous_strides(swapped);
  std::swap(out.strides[dims - 3], out.strides[dims - 2]);
  out.strided = true;
}

void infer_attention(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &q = args.in[0], &v = args.in[2];
  check_heads(args, q, args.in[1], v, args.in[3]);
  Shape sizes = q.sizes();
  sizes.back() = v.size(-1);
  describe_like(out[0], sizes, q);
  sizes.pop_back();
  describe(out[1], sizes, compute_of(q.dtype()), q);
}

void infer_attention_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &q = args.in[2], &k = args.in[3], &v = args.in[4], &result = args.in[6], &lse = args.in[7];
  check_heads(args, q, k, v, args.in[5]);
  Shape sizes = q.sizes();
  sizes.back() = v.size(-1);
  check_parameter(args, "dout", args.in[0], sizes);
  check_parameter(args, "out", result, sizes);
  sizes.pop_back();
  check_parameter(args, "dlogsumexp", args.in[1], sizes);
  check_parameter(args, "logsumexp", lse, sizes);
  CHORALE_CHECK(result.dtype() == q.dtype() && (!args.in[0].defined() || args.in[0].dtype() == q.dtype()), "[",
                args.op.name, "] the result and its gradient must be ", q.dtype(), " as q is");
  describe_like(out[0], q.sizes(), q);
  describe_like(out[1], k.sizes(), k);
  describe_like(out[2], v.sizes(), v);
}

void infer_attention_backward_joined(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &q = args.in[2], &k = args.in[3], &v = args.in[4];
  OutSpec apart[3];
  infer_attention_backward(args, apart);
  CHORALE_CHECK(q.dims() == 4 && k.sizes() == q.sizes() && v.sizes() == q.sizes(), "[", args.op.name,
                "] q, k and v must have one shape [B, H, T, D]; they are ", q.sizes(), ", ", k.sizes(), " and ",
                v.sizes());
  describe(out[0], {q.size(0), q.size(2), 3, q.size(1), q.size(3)}, q.dtype(), q);
}

// The gradient of a mask that is added to the scores has their size, so it is made of plain ops.
Tensor grad_mask(const GradArgs& g) {
  const auto& a = g.attrs.get<AttentionAttrs>();
  const DType dtype = g.out[1].dtype();
  const Shape scores = scores_shape(g.in[0], g.in[1]);
  const auto wide = [&](const Tensor& x) { return to(x, dtype); };
  // Every head of q beside its own keys and values.
  const auto per_head = [&](const Tensor& x) {
    if (!a.grouped) return wide(x);
    return repeat_interleave(wide(x), g.in[0].size(-3) / x.size(-3), -3);
  };
  Tensor dweights = zeros(scores, dtype, g.in[0].device());
  Tensor correction = zeros({1}, dtype, g.in[0].device());
  if (g.dout[0].defined()) {
    const Tensor dout = wide(g.dout[0]);
    dweights = matmul(dout, transpose(per_head(g.in[2]), -2, -1));
    if (a.dropout_p > 0) dweights = call(kDropout, kernel::DropoutAttrs{a.dropout_p}, dweights, g.in[4]);
    correction = sum(dout * wide(g.out[0]), -1, true);
  }
  if (g.dout[1].defined()) correction = correction - unsqueeze(g.dout[1], -1);
  // A query that sees no key has weights 0.
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const Tensor lse = unsqueeze(masked_fill(g.out[1], eq(g.out[1], -kInf), kInf), -1);
  const Tensor weights = exp(matmul(wide(g.in[0]), transpose(per_head(g.in[1]), -2, -1)) * a.scale + g.in[3] - lse);
  return weights * (dweights - correction);
}

Tensors grad_attention(const GradArgs& g) {
  const Tensor &q = g.in[0], &k = g.in[1], &v = g.in[2], &mask = g.in[3];
  Tensors d(5);
  if (g.needs(0) || g.needs(1) || g.needs(2)) {
    auto [dq, dk, dv] =
        call_many<3>(kAttentionBackward, g.attrs, g.dout[0], g.dout[1], q, k, v, mask, g.out[0], g.out[1], g.in[4]);
    d[0] = dq;
    d[1] = dk;
    d[2] = dv;
  }
  if (g.needs(3)) d[3] = grad_mask(g);
  return d;
}

// Leading dimensions may be split, heads too.
struct AttentionLabels {
  std::string q, k, v, mask, out, lse;

  AttentionLabels(const ShardCall& call, size_t q_at, size_t mask_at) {
    const auto& attrs = call.attrs.get<AttentionAttrs>();
    std::string leading = letters(call.dims(q_at) - 2);
    if (attrs.grouped) leading = keep_whole(leading, -1);
    q = leading + "XY";
    k = leading + "ZY";
    v = leading + "ZW";
    out = leading + "XW";
    lse = leading + "X";
    const std::string scores = leading + "XZ";
    if (call.dims(mask_at) >= 0) mask = scores.substr(scores.size() - static_cast<size_t>(call.dims(mask_at)));
  }
};

// Several heads of q belong to one of k and v: they stay together where the heads of k and v can be split evenly.
void split_grouped_heads(const ShardCall& call, ShardWays& ways, size_t q_at, size_t k_at) {
  const auto& attrs = call.attrs.get<AttentionAttrs>();
  const int64_t dims = call.dims(q_at), heads = dims - 3;
  if (!attrs.grouped || heads < 0) return;
  const int64_t q_heads = call.in[q_at].size(heads);
  if (!can_split(call.in[k_at].size(heads), call.shards, Parts::kEqual)) return;
  std::vector<Placement> in;
  for (size_t i = 0; i < call.in.size(); ++i) {
    // All have the heads at the same place, except that a mask may have fewer dimensions, and one for all heads.
    if (static_cast<int>(i) == call.op.shard.stretch) {
      in.emplace_back();
      continue;
    }
    const bool is_mask = i == q_at + 3;
    const int64_t at = is_mask ? call.dims(i) - 3 : heads;
    const bool splits = call.in[i].defined() && at >= 0 && !(is_mask && call.in[i].size(at) != q_heads);
    in.push_back(splits ? Placement::shard(at) : Placement());
  }
  ways.add(std::move(in), std::vector<Placement>(call.out.size(), Placement::shard(heads)));
}

// Dropout draws a number for every score of q, which is input kQ, and k.
template <size_t kQ>
Drawn drawn_scores(const ShardCall& call, std::span<const Part> in, std::span<const Part>) {
  Drawn scores{scores_shape(call.in[kQ], call.in[kQ + 1]), in[kQ]};
  scores.part.sizes.back() = scores.whole.back();
  return scores;
}

std::vector<Sample> samples_attention() {
  return {
      {{sample({2, 3, 2}), sample({2, 4, 2}, 1), sample({2, 4, 3}, 2), Tensor(), Tensor()},
       AttentionAttrs{.scale = 0.7}},
      {{sample({2, 2, 4, 3}), sample({2, 2, 4, 3}, 1), sample({2, 2, 4, 3}, 2), Tensor(), Tensor()},
       AttentionAttrs{.scale = 0.5, .causal = true}},
      {{sample({4, 3}), sample({5, 3}, 1), sample({5, 2}, 2), Tensor::from<bool>({true, false, true, true, false}, {5}),
        Tensor()},
       AttentionAttrs{.scale = 1}},
      {{sample({1, 4, 3, 2}), sample({1, 2, 2, 2}, 1), sample({1, 2, 2, 2}, 2), sample({3, 2}, 3), Tensor()},
       AttentionAttrs{.scale = 0.6, .grouped = true}},
      {{sample({2, 3, 2}), sample({2, 5, 2}, 1), sample({2, 5, 2}, 2), sample({2, 1, 5}, 3), sample_stretch(3, 9)},
       AttentionAttrs{.scale = 0.7, .dropout_p = 0.4}},
  };
}

}  // namespace

constinit const OpDef kAttention{
    .name = "attention",
    .inputs = "q, k, v, mask?, stretch?",
    .outputs = 2,
    .attrs = attrs_of<AttentionAttrs>,
    .dtypes = kFloats,
    .infer = infer_attention,
    .cpu = kernel::cpu::attention,
    .grad = grad_attention,
    .twice = false,
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    const AttentionLabels l(call, 0, 3);
                    ways.split(join({l.q, l.k, l.v, l.mask, "S"}, {l.out, l.lse}));
                    split_grouped_heads(call, ways, 0, 1);
                  },
              .stretch = 4,
              .drawn = drawn_scores<0>},
    .saves = {.in = {0, 1, 2, 3, 4}, .out = {0, 1}},
    .autocast = Cast::kLower,
    .samples = samples_attention,
    .formula = "softmax(scale * q k^T + mask) v",
};

constinit const OpDef kAttentionBackward{
    .name = "attention_backward",
    .inputs = "dout?, dlogsumexp?, q, k, v, mask?, out, logsumexp, stretch?",
    .outputs = 3,
    .attrs = attrs_of<AttentionAttrs>,
    .dtypes = kFloats,
    .infer = infer_attention_backward,
    .cpu = kernel::cpu::attention_backward,
    .grad = not_differentiable,
    .shard = {.ways =
                  [](const ShardCall& call, ShardWays& ways) {
                    const AttentionLabels l(call, 2, 5);
                    ways.split(join({l.out, l.lse, l.q, l.k, l.v, l.mask, l.out, l.lse, "S"}, {l.q, l.k, l.v}));
                    split_grouped_heads(call, ways, 2, 3);
                  },
              .stretch = 8,
              .drawn = drawn_scores<2>},
    .linear = linear_terms({{0}, {1}}),
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> samples;
      int seed = 30;
      for (const Sample& forward : samples_attention()) {
        const Tensor &q = forward.in[0], &k = forward.in[1], &v = forward.in[2];
        Shape out = q.sizes();
        out.back() = v.size(-1);
        Shape lse = out;
        lse.pop_back();
        const Tensor dlse = seed % 2 == 0 ? sample(lse, seed) : Tensor();
        samples.push_back({{sample(out, seed + 1), dlse, q, k, v, forward.in[3], sample(out, seed + 2),
                            sample(lse, seed + 3, 2, 4), forward.in[4]},
                           forward.attrs});
        seed += 5;
      }
      return samples;
    },
    .formula = "the gradients of q, k and v, with the weights computed again",
};

constinit const OpDef kAttentionBackwardJoined{
    .name = "attention_backward_joined",
    .inputs = "dout?, dlogsumexp?, q, k, v, mask?, out, logsumexp, stretch?",
    .attrs = attrs_of<AttentionAttrs>,
    .dtypes = kFloats,
    .infer = infer_attention_backward_joined,
    .cpu = kernel::cpu::attention_backward_joined,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> samples;
      for (const Shape& x : {Shape{2, 2, 4, 3}, Shape{1, 2, 2, 2}}) {
        const Shape lse = {x[0], x[1], x[2]};
        samples.push_back({{sample(x), sample(lse, 1), sample(x, 2), sample(x, 3), sample(x, 4), Tensor(), sample(x, 5),
                            sample(lse, 6, 2, 4), Tensor()},
                           AttentionAttrs{.scale = 0.5, .causal = x[0] == 2}});
      }
      return samples;
    },
    .formula = "the gradients of q, k and v [B, H, T, D] side by side, as [B, T, 3, H, D]",
};

Rows attention_rows() {
  static constexpr const OpDef* kRows[] = {&kAttention, &kAttentionBackward, &kAttentionBackwardJoined};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options) {
  op::need_defined("scaled_dot_product_attention", "q", q);
  op::need_defined("scaled_dot_product_attention", "k", k);
  op::need_defined("scaled_dot_product_attention", "v", v);
  CHORALE_CHECK(!(options.is_causal && options.mask.defined()),
                "[scaled_dot_product_attention] give a mask or is_causal, not both: put the causal part into the mask");
  CHORALE_CHECK(q.dims() >= 2 && k.dims() >= 2,
                "[scaled_dot_product_attention] q and k must be [.., length, depth], not ", q.sizes(), " and ",
                k.sizes());
  kernel::AttentionAttrs attrs;
  attrs.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
  attrs.causal = options.is_causal;
  attrs.grouped = options.enable_gqa;
  attrs.dropout_p = options.dropout_p;
  Tensor stretch;
  if (options.dropout_p > 0) {
    Generator& generator = options.generator ? *options.generator : default_generator();
    const int64_t weights = q.size(-1) == 0 ? 0 : q.elems() / q.size(-1) * k.size(-2);
    stretch = draw(generator, weights, q.device());
  }
  return op::call_many<2>(op::kAttention, attrs, q, k, v, options.mask, stretch)[0];
}

}  // namespace chorale
