// Normalisations: (x - mean) / sqrt(variance + eps) * weight + bias.
#pragma once

#include <memory>
#include <optional>

#include "chorale/nn/module.h"

namespace chorale::nn {

// Statistics of a training batch that is spread over several ranks, each of which sees a part of it
// (parallel/sync_batch_norm.h). A layer is given one, instead of being replaced by a layer of another type: modules are
// plain values, and a member that was declared as a BatchNorm2d stays one.
class BatchStatistics {
 public:
  virtual ~BatchStatistics() = default;
  // batch_norm in training, over the whole batch; x and the result are this rank's part.
  virtual Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                            const Tensor& weight, const Tensor& bias, double momentum, double eps) const = 0;
  virtual std::string describe() const = 0;
};

struct BatchNormOptions {
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  // none: running statistics are the mean of all batches
  bool affine = true;
  bool track_running_stats = true;
};

// Normalises each channel over the batch. Training does so with the batch's own statistics, which the running ones
// follow; evaluation with the running ones, or with the batch's own where none are kept. Use BatchNorm1d, BatchNorm2d,
// BatchNorm3d.
class BatchNorm : public Module {
 public:
  Tensor forward(const Tensor& x);
  // In training the running statistics would change: StateError.
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  // Where training takes its statistics from; null: from the batch that this layer sees. Evaluation never asks.
  void set_statistics(std::shared_ptr<const BatchStatistics> statistics) { statistics_ = std::move(statistics); }
  const std::shared_ptr<const BatchStatistics>& statistics() const { return statistics_; }

  Parameter weight, bias;  // [channels], ones and zeros
  Buffer running_mean, running_var, num_batches_tracked;
  CHORALE_MODULE(BatchNorm, weight, bias, running_mean, running_var, num_batches_tracked)

 protected:
  BatchNorm(int64_t dims, int64_t channels, const BatchNormOptions& options);

 private:
  Tensor normalize(const Tensor& x, double momentum) const;

  int64_t dims_;  // of the image
  int64_t channels_;
  BatchNormOptions options_;
  std::shared_ptr<const BatchStatistics> statistics_;
};
struct BatchNorm1d : BatchNorm {
  explicit BatchNorm1d(int64_t channels, const BatchNormOptions& options = {}) : BatchNorm(1, channels, options) {}
  const char* type_name() const override { return "BatchNorm1d"; }
};
struct BatchNorm2d : BatchNorm {
  explicit BatchNorm2d(int64_t channels, const BatchNormOptions& options = {}) : BatchNorm(2, channels, options) {}
  const char* type_name() const override { return "BatchNorm2d"; }
};
struct BatchNorm3d : BatchNorm {
  explicit BatchNorm3d(int64_t channels, const BatchNormOptions& options = {}) : BatchNorm(3, channels, options) {}
  const char* type_name() const override { return "BatchNorm3d"; }
};

struct InstanceNormOptions {
  double eps = 1e-5;
  double momentum = 0.1;
  bool affine = false;
  bool track_running_stats = false;
};
// Normalises each channel of each sample.
class InstanceNorm : public Module {
 public:
  Tensor forward(const Tensor& x);
  // In training the running statistics, where they are kept, would change: StateError.
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  Parameter weight, bias;
  Buffer running_mean, running_var, num_batches_tracked;
  CHORALE_MODULE(InstanceNorm, weight, bias, running_mean, running_var, num_batches_tracked)

 protected:
  InstanceNorm(int64_t dims, int64_t channels, const InstanceNormOptions& options);

 private:
  Tensor normalize(const Tensor& x) const;

  int64_t dims_;
  int64_t channels_;
  InstanceNormOptions options_;
};
struct InstanceNorm1d : InstanceNorm {
  explicit InstanceNorm1d(int64_t channels, const InstanceNormOptions& options = {})
      : InstanceNorm(1, channels, options) {}
  const char* type_name() const override { return "InstanceNorm1d"; }
};
struct InstanceNorm2d : InstanceNorm {
  explicit InstanceNorm2d(int64_t channels, const InstanceNormOptions& options = {})
      : InstanceNorm(2, channels, options) {}
  const char* type_name() const override { return "InstanceNorm2d"; }
};
struct InstanceNorm3d : InstanceNorm {
  explicit InstanceNorm3d(int64_t channels, const InstanceNormOptions& options = {})
      : InstanceNorm(3, channels, options) {}
  const char* type_name() const override { return "InstanceNorm3d"; }
};

struct LayerNormOptions {
  double eps = 1e-5;
  bool affine = true;
  bool bias = true;
};
// Normalises over the last dimensions, which have the given sizes.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(const IntList& normalized_shape, const LayerNormOptions& options = {});
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  Parameter weight, bias;  // of the normalized shape, ones and zeros
  CHORALE_MODULE(LayerNorm, weight, bias)

 private:
  IntList shape_;
  double eps_;
};

struct RmsNormOptions {
  std::optional<double> eps{};  // by default the distance from 1 to the next number in f32, of f64 tensors in f64
  bool affine = true;
};
// x / sqrt(mean(x^2) + eps) * weight over the last dimensions.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(const IntList& normalized_shape, const RmsNormOptions& options = {});
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  Parameter weight;
  CHORALE_MODULE(RMSNorm, weight)

 private:
  IntList shape_;
  std::optional<double> eps_;
};

struct GroupNormOptions {
  double eps = 1e-5;
  bool affine = true;
};
// Normalises groups of neighbouring channels, each sample by itself.
class GroupNorm : public Module {
 public:
  GroupNorm(int64_t groups, int64_t channels, const GroupNormOptions& options = {});
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  Parameter weight, bias;  // [channels]
  CHORALE_MODULE(GroupNorm, weight, bias)

 private:
  int64_t groups_, channels_;
  double eps_;
};

}  // namespace chorale::nn
