// Functions of neural networks. Semantics, names and defaults are PyTorch's (torch.nn.functional). Optional tensors are
// left out by passing an undefined one. f16 and bf16 are computed in f32.
#pragma once

#include <optional>
#include <vector>

#include "chorale/base/generator.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/op/op_def.h"
#include "chorale/op/reduce.h"

namespace chorale {

// ---- softmax

// exp(x) / sum(exp(x)) along one dimension, without overflow; and its logarithm.
Tensor softmax(const Tensor& x, int64_t dim = -1);
Tensor log_softmax(const Tensor& x, int64_t dim = -1);

// ---- normalisation: (x - mean) / sqrt(variance + eps) * weight + bias

// Normalises over the last dimensions, which must have the given sizes. weight and bias have that shape.
Tensor layer_norm(const Tensor& x, const IntList& normalized_shape, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
// x / sqrt(mean(x^2) + eps) * weight; by default eps is the distance from 1 to the next number of x's dtype.
Tensor rms_norm(const Tensor& x, const IntList& normalized_shape, const Tensor& weight = {},
                std::optional<double> eps = {});
// x is [N, C, …]; over groups of neighbouring channels and everything behind them, per sample. weight and bias are [C].
Tensor group_norm(const Tensor& x, int64_t groups, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
// Over everything behind the channel, per sample and channel. With running statistics, which must be given in pairs,
// those are updated as in batch_norm; without use_input_stats they are used instead of x's own.
Tensor instance_norm(const Tensor& x, const Tensor& running_mean = {}, const Tensor& running_var = {},
                     const Tensor& weight = {}, const Tensor& bias = {}, bool use_input_stats = true,
                     double momentum = 0.1, double eps = 1e-5);
// x is [N, C] or [N, C, …]; per channel over all samples and places. Training takes x's own statistics, and the running
// ones (if given) move towards them in place: r = (1 - momentum) * r + momentum * x's, with the unbiased variance.
// Otherwise the running ones are taken. The result has x's memory layout (row-major or channels last).
Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight = {},
                  const Tensor& bias = {}, bool training = false, double momentum = 0.1, double eps = 1e-5);

// ---- pooling over the last one or two dimensions of [N, C, …] or [C, …]; lists have one entry, or one per dimension.
// An empty stride is the kernel's size. Results have x's memory layout (row-major or channels last).

Tensor max_pool1d(const Tensor& x, const IntList& kernel, const IntList& stride = {}, const IntList& padding = 0,
                  const IntList& dilation = 1, bool ceil_mode = false);
Tensor max_pool2d(const Tensor& x, const IntList& kernel, const IntList& stride = {}, const IntList& padding = 0,
                  const IntList& dilation = 1, bool ceil_mode = false);
// The same, with the place of the largest element of each window in the flattened last dimensions (i64).
ValuesIndices max_pool1d_with_indices(const Tensor& x, const IntList& kernel, const IntList& stride = {},
                                      const IntList& padding = 0, const IntList& dilation = 1, bool ceil_mode = false);
ValuesIndices max_pool2d_with_indices(const Tensor& x, const IntList& kernel, const IntList& stride = {},
                                      const IntList& padding = 0, const IntList& dilation = 1, bool ceil_mode = false);
Tensor avg_pool1d(const Tensor& x, const IntList& kernel, const IntList& stride = {}, const IntList& padding = 0,
                  bool ceil_mode = false, bool count_include_pad = true);
Tensor avg_pool2d(const Tensor& x, const IntList& kernel, const IntList& stride = {}, const IntList& padding = 0,
                  bool ceil_mode = false, bool count_include_pad = true, std::optional<int64_t> divisor_override = {});
// Windows chosen so that the result has the given size; -1 keeps x's.
Tensor adaptive_avg_pool1d(const Tensor& x, const IntList& size);
Tensor adaptive_avg_pool2d(const Tensor& x, const IntList& size);
Tensor adaptive_max_pool1d(const Tensor& x, const IntList& size);
Tensor adaptive_max_pool2d(const Tensor& x, const IntList& size);
ValuesIndices adaptive_max_pool2d_with_indices(const Tensor& x, const IntList& size);

struct InterpolateOptions {
  IntList size{};                      // of the result's last dimensions; or
  std::vector<double> scale_factor{};  // one, or one per dimension
  Interpolation mode = Interpolation::kNearest;
  bool align_corners = false;
};
// Resizes the last dimension of [N, C, L], or the last two of [N, C, H, W].
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

// ---- losses; Reduction::kNone keeps the losses of single elements

// x holds logits, [N, C] or [N, C, …] (or [C]). The target holds classes (integers, x's shape without C) or
// probabilities (floating, x's shape). Classes equal to ignore_index do not count; class weights are [C];
// label_smoothing gives that much of the target to all classes alike.
Tensor cross_entropy(const Tensor& x, const Tensor& target, const Tensor& weight = {},
                     Reduction reduction = Reduction::kMean, int64_t ignore_index = -100, double label_smoothing = 0);
// The same of logarithms of probabilities, for targets that are classes.
Tensor nll_loss(const Tensor& x, const Tensor& target, const Tensor& weight = {},
                Reduction reduction = Reduction::kMean, int64_t ignore_index = -100);
// (x - y)^2 and |x - y|; shapes broadcast.
Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);
Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);
// Quadratic near 0, |x - y| up to a constant beyond beta (smooth_l1), or delta |x - y| beyond delta (huber).
Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean, double beta = 1);
Tensor huber_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean, double delta = 1);
// -(y log(x) + (1 - y) log(1 - x)) of probabilities x; the logarithms are cut at -100. `weight` broadcasts to x.
Tensor binary_cross_entropy(const Tensor& x, const Tensor& y, const Tensor& weight = {},
                            Reduction reduction = Reduction::kMean);
// The same of logits. pos_weight, which broadcasts to x, multiplies the loss of positive targets.
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& y, const Tensor& weight = {},
                                        Reduction reduction = Reduction::kMean, const Tensor& pos_weight = {});
// target (log(target) - x), x and with log_target the target too being logarithms of probabilities.
enum class KlReduction : uint8_t {
  kNone,
  kMean,
  kSum,
  kBatchMean
};  // kBatchMean: the sum divided by the first dimension
Tensor kl_div(const Tensor& x, const Tensor& target, KlReduction reduction = KlReduction::kMean,
              bool log_target = false);
// x . y / (|x| |y|) along one dimension, norms being at least eps; shapes broadcast.
Tensor cosine_similarity(const Tensor& x, const Tensor& y, int64_t dim = 1, double eps = 1e-8);

// ---- dropout and attention

// In training, elements are 0 with probability p and x / (1 - p) otherwise; else x itself. The same stretch of the
// generator's stream drops the same elements.
Tensor dropout(const Tensor& x, double p = 0.5, bool training = true, Generator& generator = default_generator());
// Drops whole channels of x [N, C, …].
Tensor feature_dropout(const Tensor& x, double p = 0.5, bool training = true,
                       Generator& generator = default_generator());

struct AttentionOptions {
  Tensor mask{};         // broadcasts to [.., queries, keys]: bool (true: takes part) or floating (added to the scores)
  double dropout_p = 0;  // of the weights
  bool is_causal = false;          // query i sees keys 0 … i
  std::optional<double> scale{};   // of the scores; 1 / sqrt(depth)
  bool enable_gqa = false;         // the heads of k and v are shared by equal groups of q's
  Generator* generator = nullptr;  // for dropout; by default the process's
};
// softmax(scale q k^T + mask) v for q [.., heads, queries, depth], k [.., heads, keys, depth] and v [.., heads, keys,
// width]. Memory is linear in the lengths, in the gradient too. A query that sees no key gets 0. The result's memory
// has the order of q's: after a transpose of heads and length it needs no copy to be transposed back.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options = {});

namespace op {
extern const OpDef kMaxPool, kMaxPoolBackward, kAdaptiveMaxPool;
extern const OpDef kAvgPool, kAvgPoolBackward, kAdaptiveAvgPool, kAdaptiveAvgPoolBackward;
extern const OpDef kInterpolate, kInterpolateBackward;
extern const OpDef kDropout, kAttention, kAttentionBackward;
extern const OpDef kCrossEntropy, kCrossEntropyBackward, kNllLoss, kNllLossBackward;
extern const OpDef kDifferenceLoss, kDifferenceLossBackward, kBinaryCrossEntropy;
extern const OpDef kSoftmax, kLogSoftmax, kSoftmaxBackward, kLogSoftmaxBackward;
extern const OpDef kLayerNorm, kLayerNormBackward, kRmsNorm, kRmsNormBackward;
extern const OpDef kGroupNorm, kGroupNormBackward, kBatchNorm, kBatchNormBackward, kRunningAverage;
}  // namespace op

}  // namespace chorale
