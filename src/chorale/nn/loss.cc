#include "chorale/nn/loss.h"

#include "chorale/api/api.h"

namespace chorale::nn {
namespace {
Buffer buffer_of(const Tensor& value) { return value.defined() ? Buffer(value) : Buffer(); }

Tensor reduced(const Tensor& losses, Reduction reduction) {
  return reduction == Reduction::kNone ? losses : reduction == Reduction::kSum ? sum(losses) : mean(losses);
}
}  // namespace

CrossEntropyLoss::CrossEntropyLoss(const CrossEntropyOptions& options)
    : weight(buffer_of(options.weight)), options_(options) {}
NLLLoss::NLLLoss(const NllOptions& options) : weight(buffer_of(options.weight)), options_(options) {}
BCELoss::BCELoss(const BceOptions& options) : weight(buffer_of(options.weight)), reduction_(options.reduction) {
  CHORALE_CHECK(!options.pos_weight.defined(), "[BCELoss] pos_weight is for BCEWithLogitsLoss");
}
BCEWithLogitsLoss::BCEWithLogitsLoss(const BceOptions& options)
    : weight(buffer_of(options.weight)), pos_weight(buffer_of(options.pos_weight)), reduction_(options.reduction) {}

Tensor CosineEmbeddingLoss::forward(const Tensor& x, const Tensor& y, const Tensor& target) const {
  // This is no cosine_similarity: the squared lengths get an eps, which also makes the gradient at 0 finite.
  const double eps = 1e-12;
  const Tensor cosine = sum(x * y, -1) / sqrt((sum(square(x), -1) + eps) * (sum(square(y), -1) + eps));
  const Tensor losses = where(eq(target, 1), 1 - cosine, relu(cosine - options_.margin));
  return reduced(losses, options_.reduction);
}

Tensor MarginRankingLoss::forward(const Tensor& x, const Tensor& y, const Tensor& target) const {
  return reduced(relu(options_.margin - target * (x - y)), options_.reduction);
}

Tensor HingeEmbeddingLoss::forward(const Tensor& x, const Tensor& target) const {
  return reduced(where(eq(target, 1), x, relu(options_.margin - x)), options_.reduction);
}

Tensor TripletMarginLoss::forward(const Tensor& anchor, const Tensor& positive, const Tensor& negative) const {
  // A difference of 0 has no direction; the eps gives its distance a gradient.
  const auto distance = [&](const Tensor& other) { return norm(anchor - other + 1e-6, 2, -1); };
  return reduced(relu(distance(positive) - distance(negative) + options_.margin), options_.reduction);
}

}  // namespace chorale::nn
