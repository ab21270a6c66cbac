#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct NadamOptions {
  double lr = 2e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;       // added to the gradient, or decoupled as in AdamW
  double momentum_decay = 4e-3;  // how soon the momentum reaches beta1
  bool decoupled = false;
  bool maximize = false;
};
CHORALE_FIELDS(NadamOptions, lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize)

// Adam with Nesterov's momentum (Dozat).
class Nadam final : public OptimizerOf<NadamOptions> {
 public:
  explicit Nadam(const NamedTensors& parameters, const NadamOptions& options = {}) : Nadam({{parameters, options}}) {}
  explicit Nadam(const std::vector<ParameterGroup<NadamOptions>>& groups) : OptimizerOf("Nadam") { add_groups(groups); }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"exp_avg", "exp_avg_sq", "mu_product"}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
  // The product of all momenta so far is one number.
  bool is_number(size_t state) const override { return state == 2; }
  double initial_state(const Attrs&, size_t state) const override { return state == 2 ? 1 : 0; }
};

}  // namespace chorale::optim
