#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct AdadeltaOptions {
  double lr = 1;
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0;  // added to the gradient
  bool maximize = false;
};
CHORALE_FIELDS(AdadeltaOptions, lr, rho, eps, weight_decay, maximize)

// Steps in the units of the parameters: each is as long as past steps were, relative to past gradients (Zeiler).
class Adadelta final : public OptimizerOf<AdadeltaOptions> {
 public:
  explicit Adadelta(const NamedTensors& parameters, const AdadeltaOptions& options = {})
      : Adadelta({{parameters, options}}) {}
  explicit Adadelta(const std::vector<ParameterGroup<AdadeltaOptions>>& groups) : OptimizerOf("Adadelta") {
    add_groups(groups);
  }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"square_avg", "acc_delta", nullptr}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
