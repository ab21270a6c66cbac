#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct LambOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 0;  // part of the step, and so of its norm
  bool maximize = false;
};
CHORALE_FIELDS(LambOptions, lr, beta1, beta2, eps, weight_decay, maximize)

// Adam's step, scaled for each parameter so that its norm is lr times the norm of the parameter (You et al., Large
// Batch Optimization for Deep Learning). Where either norm is zero the step is taken as it is.
class Lamb final : public OptimizerOf<LambOptions> {
 public:
  explicit Lamb(const NamedTensors& parameters, const LambOptions& options = {}) : Lamb({{parameters, options}}) {}
  explicit Lamb(const std::vector<ParameterGroup<LambOptions>>& groups) : OptimizerOf("Lamb") { add_groups(groups); }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"exp_avg", "exp_avg_sq", nullptr}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
