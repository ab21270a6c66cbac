#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient, where the moments see it
  bool amsgrad = false;
  bool maximize = false;
};
CHORALE_FIELDS(AdamOptions, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize)

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  // weights are multiplied by 1 - lr * weight_decay
  bool amsgrad = false;
  bool maximize = false;
};
CHORALE_FIELDS(AdamWOptions, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize)

// Adam and AdamW: they differ in where the weight decay goes.
template <class Options>
class AdamOf final : public OptimizerOf<Options> {
 public:
  explicit AdamOf(const NamedTensors& parameters, const Options& options = {}) : AdamOf({{parameters, options}}) {}
  explicit AdamOf(const std::vector<ParameterGroup<Options>>& groups);

 private:
  using typename Optimizer::StateNames;

  void check(const Attrs& options) const override;
  StateNames states(const Attrs& options) const override;
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

using Adam = AdamOf<AdamOptions>;
using AdamW = AdamOf<AdamWOptions>;
extern template class AdamOf<AdamOptions>;
extern template class AdamOf<AdamWOptions>;

}  // namespace chorale::optim
