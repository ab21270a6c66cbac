// Pooling over the last dimensions of [N, C, …] or [C, …], and dropout. Lists have one entry, or one per dimension.
#pragma once

#include <optional>

#include "chorale/nn/module.h"
#include "chorale/op/nn.h"

namespace chorale::nn {

struct MaxPoolOptions {
  IntList stride{};  // by default the kernel's size
  IntList padding = 0;
  IntList dilation = 1;
  bool ceil_mode = false;
};
class MaxPool1d : public Module {
 public:
  explicit MaxPool1d(const IntList& kernel, const MaxPoolOptions& options = {}) : kernel_(kernel), options_(options) {}
  Tensor forward(const Tensor& x) const {
    return max_pool1d(x, kernel_, options_.stride, options_.padding, options_.dilation, options_.ceil_mode);
  }
  std::string describe() const override { return concat("kernel=", kernel_.shape()); }
  CHORALE_MODULE(MaxPool1d)

 private:
  IntList kernel_;
  MaxPoolOptions options_;
};
class MaxPool2d : public Module {
 public:
  explicit MaxPool2d(const IntList& kernel, const MaxPoolOptions& options = {}) : kernel_(kernel), options_(options) {}
  Tensor forward(const Tensor& x) const {
    return max_pool2d(x, kernel_, options_.stride, options_.padding, options_.dilation, options_.ceil_mode);
  }
  std::string describe() const override { return concat("kernel=", kernel_.shape()); }
  CHORALE_MODULE(MaxPool2d)

 private:
  IntList kernel_;
  MaxPoolOptions options_;
};

struct AvgPoolOptions {
  IntList stride{};
  IntList padding = 0;
  bool ceil_mode = false;
  bool count_include_pad = true;
  std::optional<int64_t> divisor_override{};  // two dimensions only
};
class AvgPool1d : public Module {
 public:
  explicit AvgPool1d(const IntList& kernel, const AvgPoolOptions& options = {});
  Tensor forward(const Tensor& x) const {
    return avg_pool1d(x, kernel_, options_.stride, options_.padding, options_.ceil_mode, options_.count_include_pad);
  }
  std::string describe() const override { return concat("kernel=", kernel_.shape()); }
  CHORALE_MODULE(AvgPool1d)

 private:
  IntList kernel_;
  AvgPoolOptions options_;
};
class AvgPool2d : public Module {
 public:
  explicit AvgPool2d(const IntList& kernel, const AvgPoolOptions& options = {}) : kernel_(kernel), options_(options) {}
  Tensor forward(const Tensor& x) const {
    return avg_pool2d(x, kernel_, options_.stride, options_.padding, options_.ceil_mode, options_.count_include_pad,
                      options_.divisor_override);
  }
  std::string describe() const override { return concat("kernel=", kernel_.shape()); }
  CHORALE_MODULE(AvgPool2d)

 private:
  IntList kernel_;
  AvgPoolOptions options_;
};

// Windows chosen so that the result has the given size; -1 keeps x's.
class AdaptiveAvgPool1d : public Module {
 public:
  explicit AdaptiveAvgPool1d(const IntList& size) : size_(size) {}
  Tensor forward(const Tensor& x) const { return adaptive_avg_pool1d(x, size_); }
  std::string describe() const override { return concat(size_.shape()); }
  CHORALE_MODULE(AdaptiveAvgPool1d)

 private:
  IntList size_;
};
class AdaptiveAvgPool2d : public Module {
 public:
  explicit AdaptiveAvgPool2d(const IntList& size) : size_(size) {}
  Tensor forward(const Tensor& x) const { return adaptive_avg_pool2d(x, size_); }
  std::string describe() const override { return concat(size_.shape()); }
  CHORALE_MODULE(AdaptiveAvgPool2d)

 private:
  IntList size_;
};

// In training, elements are 0 with probability p and x / (1 - p) otherwise; the random numbers are the process's.
class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5);
  Tensor forward(const Tensor& x) const { return dropout(x, p_, is_training()); }
  std::string describe() const override { return to_text(p_); }
  CHORALE_MODULE(Dropout)

 private:
  double p_;
};
// Drops whole channels of [N, C, H, W].
class Dropout2d : public Module {
 public:
  explicit Dropout2d(double p = 0.5);
  Tensor forward(const Tensor& x) const { return feature_dropout(x, p_, is_training()); }
  std::string describe() const override { return to_text(p_); }
  CHORALE_MODULE(Dropout2d)

 private:
  double p_;
};

}  // namespace chorale::nn
