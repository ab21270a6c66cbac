#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;  // added to the gradient
  bool nesterov = false;
  bool maximize = false;
};
CHORALE_FIELDS(SgdOptions, lr, momentum, dampening, weight_decay, nesterov, maximize)

// Stochastic gradient descent. The first momentum is the gradient itself, without dampening.
class Sgd final : public OptimizerOf<SgdOptions> {
 public:
  explicit Sgd(const NamedTensors& parameters, const SgdOptions& options = {}) : Sgd({{parameters, options}}) {}
  explicit Sgd(const std::vector<ParameterGroup<SgdOptions>>& groups) : OptimizerOf("Sgd") { add_groups(groups); }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs& options) const override;
  void update(const UpdateLists& lists, const Attrs& options) const override;
  bool takes_sparse(const Attrs& options) const override;
};

}  // namespace chorale::optim
