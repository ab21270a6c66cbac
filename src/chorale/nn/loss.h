// Losses as modules, with PyTorch's names and defaults; the functions they call are in op/nn.h.
#pragma once

#include "chorale/nn/module.h"
#include "chorale/op/nn.h"

namespace chorale::nn {

struct CrossEntropyOptions {
  Tensor weight{};  // of the classes
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
};
// Takes logits.
class CrossEntropyLoss : public Module {
 public:
  explicit CrossEntropyLoss(const CrossEntropyOptions& options = {});
  Tensor forward(const Tensor& x, const Tensor& target) const {
    return cross_entropy(x, target, weight, options_.reduction, options_.ignore_index, options_.label_smoothing);
  }

  Buffer weight;
  CHORALE_MODULE(CrossEntropyLoss, weight)

 private:
  CrossEntropyOptions options_;
};

struct NllOptions {
  Tensor weight{};
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
};
// Takes logarithms of probabilities.
class NLLLoss : public Module {
 public:
  explicit NLLLoss(const NllOptions& options = {});
  Tensor forward(const Tensor& x, const Tensor& target) const {
    return nll_loss(x, target, weight, options_.reduction, options_.ignore_index);
  }

  Buffer weight;
  CHORALE_MODULE(NLLLoss, weight)

 private:
  NllOptions options_;
};

class MSELoss : public Module {
 public:
  explicit MSELoss(Reduction reduction = Reduction::kMean) : reduction_(reduction) {}
  Tensor forward(const Tensor& x, const Tensor& y) const { return mse_loss(x, y, reduction_); }
  CHORALE_MODULE(MSELoss)

 private:
  Reduction reduction_;
};

class L1Loss : public Module {
 public:
  explicit L1Loss(Reduction reduction = Reduction::kMean) : reduction_(reduction) {}
  Tensor forward(const Tensor& x, const Tensor& y) const { return l1_loss(x, y, reduction_); }
  CHORALE_MODULE(L1Loss)

 private:
  Reduction reduction_;
};

struct SmoothL1Options {
  Reduction reduction = Reduction::kMean;
  double beta = 1;
};
class SmoothL1Loss : public Module {
 public:
  explicit SmoothL1Loss(const SmoothL1Options& options = {}) : options_(options) {}
  Tensor forward(const Tensor& x, const Tensor& y) const {
    return smooth_l1_loss(x, y, options_.reduction, options_.beta);
  }
  CHORALE_MODULE(SmoothL1Loss)

 private:
  SmoothL1Options options_;
};

struct HuberOptions {
  Reduction reduction = Reduction::kMean;
  double delta = 1;
};
class HuberLoss : public Module {
 public:
  explicit HuberLoss(const HuberOptions& options = {}) : options_(options) {}
  Tensor forward(const Tensor& x, const Tensor& y) const {
    return huber_loss(x, y, options_.reduction, options_.delta);
  }
  CHORALE_MODULE(HuberLoss)

 private:
  HuberOptions options_;
};

struct BceOptions {
  Tensor weight{};  // broadcasts to x
  Reduction reduction = Reduction::kMean;
  Tensor pos_weight{};  // of positive targets; with logits only
};
// Takes probabilities.
class BCELoss : public Module {
 public:
  explicit BCELoss(const BceOptions& options = {});
  Tensor forward(const Tensor& x, const Tensor& y) const { return binary_cross_entropy(x, y, weight, reduction_); }

  Buffer weight;
  CHORALE_MODULE(BCELoss, weight)

 private:
  Reduction reduction_;
};
class BCEWithLogitsLoss : public Module {
 public:
  explicit BCEWithLogitsLoss(const BceOptions& options = {});
  Tensor forward(const Tensor& x, const Tensor& y) const {
    return binary_cross_entropy_with_logits(x, y, weight, reduction_, pos_weight);
  }

  Buffer weight, pos_weight;
  CHORALE_MODULE(BCEWithLogitsLoss, weight, pos_weight)

 private:
  Reduction reduction_;
};

struct KlDivOptions {
  KlReduction reduction = KlReduction::kMean;
  bool log_target = false;
};
class KLDivLoss : public Module {
 public:
  explicit KLDivLoss(const KlDivOptions& options = {}) : options_(options) {}
  Tensor forward(const Tensor& x, const Tensor& y) const {
    return kl_div(x, y, options_.reduction, options_.log_target);
  }
  CHORALE_MODULE(KLDivLoss)

 private:
  KlDivOptions options_;
};

class CosineSimilarity : public Module {
 public:
  explicit CosineSimilarity(int64_t dim = 1, double eps = 1e-8) : dim_(dim), eps_(eps) {}
  Tensor forward(const Tensor& x, const Tensor& y) const { return cosine_similarity(x, y, dim_, eps_); }
  CHORALE_MODULE(CosineSimilarity)

 private:
  int64_t dim_;
  double eps_;
};

struct MarginOptions {
  double margin = 0;
  Reduction reduction = Reduction::kMean;
};
// 1 - cos(x, y) where the target is 1, max(0, cos(x, y) - margin) where it is -1; x and y are [N, D] or [D].
class CosineEmbeddingLoss : public Module {
 public:
  explicit CosineEmbeddingLoss(const MarginOptions& options = {}) : options_(options) {}
  Tensor forward(const Tensor& x, const Tensor& y, const Tensor& target) const;
  CHORALE_MODULE(CosineEmbeddingLoss)

 private:
  MarginOptions options_;
};
// max(0, margin - target (x - y)) for targets 1 (x is to be larger) and -1.
class MarginRankingLoss : public Module {
 public:
  explicit MarginRankingLoss(const MarginOptions& options = {}) : options_(options) {}
  Tensor forward(const Tensor& x, const Tensor& y, const Tensor& target) const;
  CHORALE_MODULE(MarginRankingLoss)

 private:
  MarginOptions options_;
};
// x where the target is 1, max(0, margin - x) where it is -1.
class HingeEmbeddingLoss : public Module {
 public:
  explicit HingeEmbeddingLoss(const MarginOptions& options = {.margin = 1}) : options_(options) {}
  Tensor forward(const Tensor& x, const Tensor& target) const;
  CHORALE_MODULE(HingeEmbeddingLoss)

 private:
  MarginOptions options_;
};
// max(0, |anchor - positive| - |anchor - negative| + margin), with the Euclidean distance over the last dimension.
class TripletMarginLoss : public Module {
 public:
  explicit TripletMarginLoss(const MarginOptions& options = {.margin = 1}) : options_(options) {}
  Tensor forward(const Tensor& anchor, const Tensor& positive, const Tensor& negative) const;
  CHORALE_MODULE(TripletMarginLoss)

 private:
  MarginOptions options_;
};

}  // namespace chorale::nn
