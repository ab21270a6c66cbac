// Activations: modules around the functions of the same name, with PyTorch's names and defaults.
#pragma once

#include "chorale/nn/module.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"

namespace chorale::nn {

struct ReLU : Module {
  CHORALE_MODULE(ReLU)
  Tensor forward(const Tensor& x) const { return relu(x); }
};
struct Sigmoid : Module {
  CHORALE_MODULE(Sigmoid)
  Tensor forward(const Tensor& x) const { return sigmoid(x); }
};
struct Tanh : Module {
  CHORALE_MODULE(Tanh)
  Tensor forward(const Tensor& x) const { return tanh(x); }
};
struct SiLU : Module {
  CHORALE_MODULE(SiLU)
  Tensor forward(const Tensor& x) const { return silu(x); }
};
struct ReLU6 : Module {
  CHORALE_MODULE(ReLU6)
  Tensor forward(const Tensor& x) const { return hardtanh(x, 0, 6); }
};
// clamp(x + 3, 0, 6) / 6
struct Hardsigmoid : Module {
  CHORALE_MODULE(Hardsigmoid)
  Tensor forward(const Tensor& x) const { return hardtanh(x + 3, 0, 6) / 6; }
};
struct Hardswish : Module {
  CHORALE_MODULE(Hardswish)
  Tensor forward(const Tensor& x) const { return x * hardtanh(x + 3, 0, 6) / 6; }
};
// x tanh(softplus(x))
struct Mish : Module {
  CHORALE_MODULE(Mish)
  Tensor forward(const Tensor& x) const { return x * tanh(softplus(x)); }
};
struct Softsign : Module {
  CHORALE_MODULE(Softsign)
  Tensor forward(const Tensor& x) const { return x / (abs(x) + 1); }
};
struct LogSigmoid : Module {
  CHORALE_MODULE(LogSigmoid)
  Tensor forward(const Tensor& x) const { return neg(softplus(neg(x))); }
};
// elu with the constants that keep mean 0 and variance 1.
struct SELU : Module {
  CHORALE_MODULE(SELU)
  Tensor forward(const Tensor& x) const {
    return elu(x, 1.6732632423543772848170429916717) * 1.0507009873554804934193349852946;
  }
};

class GELU : public Module {
 public:
  explicit GELU(Gelu form = Gelu::kErf) : form_(form) {}
  Tensor forward(const Tensor& x) const { return gelu(x, form_); }
  std::string describe() const override { return form_ == Gelu::kTanh ? "tanh" : ""; }
  CHORALE_MODULE(GELU)

 private:
  Gelu form_;
};

class LeakyReLU : public Module {
 public:
  explicit LeakyReLU(double negative_slope = 0.01) : slope_(negative_slope) {}
  Tensor forward(const Tensor& x) const { return leaky_relu(x, slope_); }
  std::string describe() const override { return to_text(slope_); }
  CHORALE_MODULE(LeakyReLU)

 private:
  double slope_;
};

class ELU : public Module {
 public:
  explicit ELU(double alpha = 1) : alpha_(alpha) {}
  Tensor forward(const Tensor& x) const { return elu(x, alpha_); }
  std::string describe() const override { return to_text(alpha_); }
  CHORALE_MODULE(ELU)

 private:
  double alpha_;
};

class Softplus : public Module {
 public:
  explicit Softplus(double beta = 1, double threshold = 20) : beta_(beta), threshold_(threshold) {}
  Tensor forward(const Tensor& x) const { return softplus(x, beta_, threshold_); }
  std::string describe() const override { return to_text(beta_) + ", " + to_text(threshold_); }
  CHORALE_MODULE(Softplus)

 private:
  double beta_, threshold_;
};

class Hardtanh : public Module {
 public:
  explicit Hardtanh(double min = -1, double max = 1) : min_(min), max_(max) {}
  Tensor forward(const Tensor& x) const { return hardtanh(x, min_, max_); }
  std::string describe() const override { return to_text(min_) + ", " + to_text(max_); }
  CHORALE_MODULE(Hardtanh)

 private:
  double min_, max_;
};

class Softmax : public Module {
 public:
  explicit Softmax(int64_t dim = -1) : dim_(dim) {}
  Tensor forward(const Tensor& x) const { return softmax(x, dim_); }
  std::string describe() const override { return "dim=" + std::to_string(dim_); }
  CHORALE_MODULE(Softmax)

 private:
  int64_t dim_;
};

class LogSoftmax : public Module {
 public:
  explicit LogSoftmax(int64_t dim = -1) : dim_(dim) {}
  Tensor forward(const Tensor& x) const { return log_softmax(x, dim_); }
  std::string describe() const override { return "dim=" + std::to_string(dim_); }
  CHORALE_MODULE(LogSoftmax)

 private:
  int64_t dim_;
};

// The first half of a dimension times the sigmoid of the second.
class GLU : public Module {
 public:
  explicit GLU(int64_t dim = -1) : dim_(dim) {}
  Tensor forward(const Tensor& x) const;
  std::string describe() const override { return "dim=" + std::to_string(dim_); }
  CHORALE_MODULE(GLU)

 private:
  int64_t dim_;
};

// leaky_relu with a slope that is trained, one for all channels (dimension 1) or one per channel.
class PReLU : public Module {
 public:
  explicit PReLU(int64_t num_parameters = 1, double init = 0.25);
  Tensor forward(const Tensor& x) const;
  std::string describe() const override { return std::to_string(weight.elems()); }

  Parameter weight;  // [num_parameters]
  CHORALE_MODULE(PReLU, weight)
};

}  // namespace chorale::nn
