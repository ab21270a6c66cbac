#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct AsgdOptions {
  double lr = 1e-2;
  double lambd = 1e-4;  // how fast the rate falls, and weights shrink
  double alpha = 0.75;
  double t0 = 1e6;          // averaging begins behind this step
  double weight_decay = 0;  // added to the gradient
  bool maximize = false;
};
CHORALE_FIELDS(AsgdOptions, lr, lambd, alpha, t0, weight_decay, maximize)

// Averaged stochastic gradient descent (Polyak and Juditsky): the state "ax" is the average of the parameters since
// step t0. The rate of step t is lr / (1 + lambd * lr * (t - 1))^alpha.
class Asgd final : public OptimizerOf<AsgdOptions> {
 public:
  explicit Asgd(const NamedTensors& parameters, const AsgdOptions& options = {}) : Asgd({{parameters, options}}) {}
  explicit Asgd(const std::vector<ParameterGroup<AsgdOptions>>& groups) : OptimizerOf("Asgd") { add_groups(groups); }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"ax", nullptr, nullptr}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
