#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct AdamaxOptions {
  double lr = 2e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient
  bool maximize = false;
};
CHORALE_FIELDS(AdamaxOptions, lr, beta1, beta2, eps, weight_decay, maximize)

// Adam with the largest gradient, slowly forgotten, instead of the average square (Kingma and Ba).
class Adamax final : public OptimizerOf<AdamaxOptions> {
 public:
  explicit Adamax(const NamedTensors& parameters, const AdamaxOptions& options = {})
      : Adamax({{parameters, options}}) {}
  explicit Adamax(const std::vector<ParameterGroup<AdamaxOptions>>& groups) : OptimizerOf("Adamax") {
    add_groups(groups);
  }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"exp_avg", "exp_inf", nullptr}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
