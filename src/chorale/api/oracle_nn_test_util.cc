#include "chorale/api/oracle_calls_test_util.h"
#include "chorale/op/functions.h"

namespace chorale::oracle {
namespace {

using Out = std::vector<Tensor>;

Reduction reduction(const Json& a) {
  const Json& name = a["reduction"];
  return name == "none" ? Reduction::kNone : name == "mean" ? Reduction::kMean : Reduction::kSum;
}
KlReduction kl_reduction(const Json& a) {
  const Json& name = a["reduction"];
  if (name == "batchmean") return KlReduction::kBatchMean;
  return name == "none" ? KlReduction::kNone : name == "mean" ? KlReduction::kMean : KlReduction::kSum;
}

void add_norms(Calls& calls) {
  calls["softmax"] = [](In in, const Json& a) -> Out { return {softmax(in[0], a["dim"])}; };
  calls["log_softmax"] = [](In in, const Json& a) -> Out { return {log_softmax(in[0], a["dim"])}; };
  calls["layer_norm"] = [](In in, const Json& a) -> Out { return {layer_norm(in[0], ints(a["shape"]), in[1], in[2])}; };
  calls["rms_norm"] = [](In in, const Json& a) -> Out {
    return {rms_norm(in[0], ints(a["shape"]), in[1], a["eps"].get<double>())};
  };
  calls["group_norm"] = [](In in, const Json& a) -> Out { return {group_norm(in[0], a["groups"], in[1], in[2])}; };
  calls["instance_norm"] = [](In in, const Json&) -> Out { return {instance_norm(in[0])}; };
  calls["batch_norm"] = [](In in, const Json& a) -> Out {
    const Tensor y = batch_norm(in[0], in[1], in[2], in[3], in[4], a["training"]);
    return {y, in[1], in[2]};
  };
}

void add_pools(Calls& calls) {
  calls["max_pool1d"] = [](In in, const Json& a) -> Out {
    return {
        max_pool1d(in[0], ints(a["kernel"]), ints(a["stride"]), ints(a["padding"]), ints(a["dilation"]), a["ceil"])};
  };
  calls["max_pool2d"] = [](In in, const Json& a) -> Out {
    return {
        max_pool2d(in[0], ints(a["kernel"]), ints(a["stride"]), ints(a["padding"]), ints(a["dilation"]), a["ceil"])};
  };
  calls["avg_pool2d"] = [](In in, const Json& a) -> Out {
    return {avg_pool2d(in[0], ints(a["kernel"]), ints(a["stride"]), ints(a["padding"]), a["ceil"], a["include"])};
  };
  calls["adaptive_avg_pool1d"] = [](In in, const Json& a) -> Out {
    return {adaptive_avg_pool1d(in[0], ints(a["size"]))};
  };
  calls["adaptive_avg_pool2d"] = [](In in, const Json& a) -> Out {
    return {adaptive_avg_pool2d(in[0], ints(a["size"]))};
  };
  calls["adaptive_max_pool2d"] = [](In in, const Json& a) -> Out {
    return {adaptive_max_pool2d(in[0], ints(a["size"]))};
  };
  calls["interpolate"] = [](In in, const Json& a) -> Out {
    InterpolateOptions options;
    options.size = ints(a["size"]);
    options.mode = a["mode"] == "nearest" ? Interpolation::kNearest : Interpolation::kLinear;
    options.align_corners = a.value("corners", false);
    return {interpolate(in[0], options)};
  };
}

void add_losses(Calls& calls) {
  calls["cross_entropy"] = [](In in, const Json& a) -> Out {
    return {cross_entropy(in[0], in[1], in[2], reduction(a), -100, a["smoothing"])};
  };
  calls["nll_loss"] = [](In in, const Json& a) -> Out { return {nll_loss(in[0], in[1], in[2], reduction(a))}; };
  calls["mse_loss"] = [](In in, const Json& a) -> Out { return {mse_loss(in[0], in[1], reduction(a))}; };
  calls["l1_loss"] = [](In in, const Json& a) -> Out { return {l1_loss(in[0], in[1], reduction(a))}; };
  calls["smooth_l1_loss"] = [](In in, const Json& a) -> Out {
    return {smooth_l1_loss(in[0], in[1], reduction(a), a["beta"])};
  };
  calls["huber_loss"] = [](In in, const Json& a) -> Out {
    return {huber_loss(in[0], in[1], reduction(a), a["delta"])};
  };
  calls["bce"] = [](In in, const Json& a) -> Out { return {binary_cross_entropy(in[0], in[1], {}, reduction(a))}; };
  calls["bce_with_logits"] = [](In in, const Json& a) -> Out {
    return {binary_cross_entropy_with_logits(in[0], in[1], {}, reduction(a), in[2])};
  };
  calls["kl_div"] = [](In in, const Json& a) -> Out {
    return {kl_div(in[0], in[1], kl_reduction(a), a["log_target"])};
  };
  calls["cosine_similarity"] = [](In in, const Json& a) -> Out { return {cosine_similarity(in[0], in[1], a["dim"])}; };
  calls["attention"] = [](In in, const Json& a) -> Out {
    AttentionOptions options;
    options.mask = in[3];
    options.is_causal = a["causal"];
    options.enable_gqa = a["gqa"];
    return {scaled_dot_product_attention(in[0], in[1], in[2], options)};
  };
}

}  // namespace

Calls nn_calls() {
  Calls calls;
  add_norms(calls);
  add_pools(calls);
  add_losses(calls);
  return calls;
}

}  // namespace chorale::oracle
