#include "chorale/nn/init.h"

#include <algorithm>
#include <cmath>

#include "chorale/api/api.h"
#include "chorale/op/device_scope.h"
#include "chorale/op/need_defined.h"
#include "chorale/sharding/sharded.h"

namespace chorale::nn::init {

namespace {
// Parts of parts (fully sharded over tensor parallel) are no stretch of the whole that could be drawn by itself.
bool is_drawn_whole(const Tensor& x) {
  if (!x.is_sharded()) return false;
  const Placements& placements = placements_of(x);
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_strided(); });
}
const Tensor& take_part(const Tensor& x, const Tensor& whole) {
  copy_(sharding::local_of(x), sharding::local_of(distribute(whole, mesh_of(x), placements_of(x), std::nullopt)));
  return x;
}

// What is computed from numbers that were drawn is computed on the host, wherever x is. Of a tensor without memory only
// the generator goes on.
Device place_of_draws(const Tensor& x) { return x.device() == kNull ? kNull : kCpu; }
}  // namespace

const Tensor& uniform_(const Tensor& x, double low, double high, Generator& generator) {
  op::need_defined("uniform_", "x", x);
  const NoGrad quiet;
  if (is_drawn_whole(x)) return take_part(x, chorale::uniform(x.sizes(), low, high, x.dtype(), generator));
  return chorale::uniform_(x, low, high, generator);
}

const Tensor& normal_(const Tensor& x, double mean, double stddev, Generator& generator) {
  op::need_defined("normal_", "x", x);
  const NoGrad quiet;
  if (is_drawn_whole(x)) return take_part(x, chorale::normal(x.sizes(), mean, stddev, x.dtype(), generator));
  return chorale::normal_(x, mean, stddev, generator);
}

namespace {
double normal_cdf(double z) { return 0.5 * std::erfc(-z * M_SQRT1_2); }

// The z with normal_cdf(z) = p: Newton's method on the logarithm of the smaller tail, which is concave there, so that
// it converges from any side and also far out.
double normal_quantile(double p) {
  if (p <= 0) return -INFINITY;
  if (p >= 1) return INFINITY;
  if (p > 0.5) return -normal_quantile(1 - p);
  double z = p < 1e-3 ? -std::sqrt(-2 * std::log(p)) : 0;
  for (int i = 0; i < 50; ++i) {
    const double cdf = normal_cdf(z), density = std::exp(-z * z / 2) * (M_2_SQRTPI * M_SQRT1_2 / 2);
    const double step = std::log(cdf / p) * cdf / density;
    z -= step;
    if (std::abs(step) < 1e-14 * (1 + std::abs(z))) break;
  }
  return z;
}
}  // namespace

const Tensor& trunc_normal_(const Tensor& x, double mean, double stddev, double low, double high,
                            Generator& generator) {
  op::need_defined("trunc_normal_", "x", x);
  CHORALE_CHECK(low < high && stddev > 0, "[trunc_normal_] expected low < high and a positive deviation, found ", low,
                ", ", high, ", ", stddev);
  const double from = normal_cdf((low - mean) / stddev), until = normal_cdf((high - mean) / stddev);
  CHORALE_CHECK(from < until, "[trunc_normal_] there is nothing of the distribution between ", low, " and ", high,
                ": more than 8 deviations from the mean ", mean);
  const NoGrad quiet;
  const DeviceScope place(place_of_draws(x));
  const Tensor draws = chorale::uniform(x.sizes(), from, until, DType::kF64, generator);
  if (x.device() == kNull) return x;
  for (double& draw : draws.span<double>()) draw = std::clamp(mean + stddev * normal_quantile(draw), low, high);
  return copy_(x, draws);
}

const Tensor& constant_(const Tensor& x, double value) {
  op::need_defined("constant_", "x", x);
  const NoGrad quiet;
  return fill_(x, value);
}
const Tensor& zeros_(const Tensor& x) {
  op::need_defined("zeros_", "x", x);
  return constant_(x, 0);
}
const Tensor& ones_(const Tensor& x) {
  op::need_defined("ones_", "x", x);
  return constant_(x, 1);
}

Fans fans_of(const Tensor& weight) {
  op::need_defined("fans_of", "weight", weight);
  CHORALE_CHECK(weight.dims() >= 2, "[init] the fans of a weight need at least two dimensions, found shape ",
                weight.sizes());
  double window = 1;
  for (int64_t d = 2; d < weight.dims(); ++d) window *= static_cast<double>(weight.size(d));
  return {window * static_cast<double>(weight.size(1)), window * static_cast<double>(weight.size(0))};
}

double gain_of(Nonlinearity nonlinearity, double slope) {
  switch (nonlinearity) {
    case Nonlinearity::kLinear:
    case Nonlinearity::kSigmoid:
      return 1;
    case Nonlinearity::kTanh:
      return 5.0 / 3;
    case Nonlinearity::kRelu:
      return M_SQRT2;
    case Nonlinearity::kLeakyRelu:
      return std::sqrt(2 / (1 + slope * slope));
    case Nonlinearity::kSelu:
      return 0.75;
  }
  __builtin_unreachable();
}

const Tensor& xavier_normal_(const Tensor& weight, double gain, Generator& generator) {
  op::need_defined("xavier_normal_", "weight", weight);
  const Fans fans = fans_of(weight);
  return init::normal_(weight, 0, gain * std::sqrt(2 / (fans.in + fans.out)), generator);
}

// A uniform distribution in (-b, b) has variance b^2 / 3.
const Tensor& xavier_uniform_(const Tensor& weight, double gain, Generator& generator) {
  op::need_defined("xavier_uniform_", "weight", weight);
  const Fans fans = fans_of(weight);
  const double bound = gain * std::sqrt(6 / (fans.in + fans.out));
  return init::uniform_(weight, -bound, bound, generator);
}

namespace {
double kaiming_deviation(const Tensor& weight, const KaimingOptions& options) {
  const Fans fans = fans_of(weight);
  return gain_of(options.nonlinearity, options.slope) / std::sqrt(options.mode == FanMode::kIn ? fans.in : fans.out);
}
}  // namespace

const Tensor& kaiming_normal_(const Tensor& weight, const KaimingOptions& options, Generator& generator) {
  op::need_defined("kaiming_normal_", "weight", weight);
  return init::normal_(weight, 0, kaiming_deviation(weight, options), generator);
}

const Tensor& kaiming_uniform_(const Tensor& weight, const KaimingOptions& options, Generator& generator) {
  op::need_defined("kaiming_uniform_", "weight", weight);
  const double bound = std::sqrt(3.0) * kaiming_deviation(weight, options);
  return init::uniform_(weight, -bound, bound, generator);
}

const Tensor& orthogonal_(const Tensor& weight, double gain, Generator& generator) {
  op::need_defined("orthogonal_", "weight", weight);
  CHORALE_CHECK(weight.dims() >= 2, "[orthogonal_] needs at least two dimensions, found shape ", weight.sizes());
  if (weight.elems() == 0) return weight;
  const NoGrad quiet;
  const int64_t rows = weight.size(0), columns = weight.elems() / rows;
  const bool wide = rows < columns;
  const DeviceScope place(place_of_draws(weight));
  const Tensor draws =
      chorale::normal({std::max(rows, columns), std::min(rows, columns)}, 0, 1, DType::kF64, generator);
  const auto [q, r] = qr(draws);
  // The signs of r's diagonal make the distribution uniform over all orthogonal matrices.
  const Tensor matrix = mul(mul(q, sign(diagonal(r))), gain);
  return copy_(weight, reshape(wide ? t(matrix) : matrix, weight.sizes()));
}

}  // namespace chorale::nn::init
