// Initialisers: they overwrite a tensor's values, without a record for autograd, and return it.
#pragma once

#include "chorale/base/generator.h"
#include "chorale/tensor/tensor.h"

namespace chorale::nn::init {

const Tensor& uniform_(const Tensor& x, double low = 0, double high = 1, Generator& generator = default_generator());
const Tensor& normal_(const Tensor& x, double mean = 0, double stddev = 1, Generator& generator = default_generator());
// Values outside [low, high] are drawn again (by the inverse of the distribution, in one pass).
const Tensor& trunc_normal_(const Tensor& x, double mean = 0, double stddev = 1, double low = -2, double high = 2,
                            Generator& generator = default_generator());
const Tensor& constant_(const Tensor& x, double value);
const Tensor& zeros_(const Tensor& x);
const Tensor& ones_(const Tensor& x);

// How many inputs feed one output of a weight [out, in, kernel…], and how many outputs one input feeds.
struct Fans {
  double in, out;
};
Fans fans_of(const Tensor& weight);

enum class Nonlinearity : uint8_t { kLinear, kSigmoid, kTanh, kRelu, kLeakyRelu, kSelu };
// The factor by which weights before this function are scaled; `slope` is leaky_relu's.
double gain_of(Nonlinearity nonlinearity, double slope = 0.01);

// Variance 2 gain^2 / (fan in + fan out): signals keep their size in both directions.
const Tensor& xavier_uniform_(const Tensor& weight, double gain = 1, Generator& generator = default_generator());
const Tensor& xavier_normal_(const Tensor& weight, double gain = 1, Generator& generator = default_generator());

enum class FanMode : uint8_t { kIn, kOut };
struct KaimingOptions {
  double slope = 0;  // of leaky_relu
  FanMode mode = FanMode::kIn;
  Nonlinearity nonlinearity = Nonlinearity::kLeakyRelu;
};
// Variance gain^2 / fan: signals keep their size in one direction.
const Tensor& kaiming_uniform_(const Tensor& weight, const KaimingOptions& options = {},
                               Generator& generator = default_generator());
const Tensor& kaiming_normal_(const Tensor& weight, const KaimingOptions& options = {},
                              Generator& generator = default_generator());

// Rows (or columns, whichever are fewer) of the weight as a matrix [out, rest] are orthogonal, of length `gain`.
const Tensor& orthogonal_(const Tensor& weight, double gain = 1, Generator& generator = default_generator());

}  // namespace chorale::nn::init
