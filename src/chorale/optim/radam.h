#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct RadamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient, or decoupled as in AdamW
  bool decoupled = false;
  bool maximize = false;
};
CHORALE_FIELDS(RadamOptions, lr, beta1, beta2, eps, weight_decay, decoupled, maximize)

// Adam that does not divide by the variance before enough steps are known to rely on it (Liu et al.).
class Radam final : public OptimizerOf<RadamOptions> {
 public:
  explicit Radam(const NamedTensors& parameters, const RadamOptions& options = {}) : Radam({{parameters, options}}) {}
  explicit Radam(const std::vector<ParameterGroup<RadamOptions>>& groups) : OptimizerOf("Radam") { add_groups(groups); }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"exp_avg", "exp_avg_sq", nullptr}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
