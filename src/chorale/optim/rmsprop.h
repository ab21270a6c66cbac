#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct RmspropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;  // divide by the deviation from the mean gradient
  bool maximize = false;
};
CHORALE_FIELDS(RmspropOptions, lr, alpha, eps, weight_decay, momentum, centered, maximize)

class Rmsprop final : public OptimizerOf<RmspropOptions> {
 public:
  explicit Rmsprop(const NamedTensors& parameters, const RmspropOptions& options = {})
      : Rmsprop({{parameters, options}}) {}
  explicit Rmsprop(const std::vector<ParameterGroup<RmspropOptions>>& groups) : OptimizerOf("Rmsprop") {
    add_groups(groups);
  }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs& options) const override;
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
