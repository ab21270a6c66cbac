#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;  // the rate of step t is lr / (1 + (t - 1) * lr_decay)
  double weight_decay = 0;
  double initial_accumulator = 0;
  double eps = 1e-10;
  bool maximize = false;
};
CHORALE_FIELDS(AdagradOptions, lr, lr_decay, weight_decay, initial_accumulator, eps, maximize)

// Takes sparse gradients when there is no weight decay.
class Adagrad final : public OptimizerOf<AdagradOptions> {
 public:
  explicit Adagrad(const NamedTensors& parameters, const AdagradOptions& options = {})
      : Adagrad({{parameters, options}}) {}
  explicit Adagrad(const std::vector<ParameterGroup<AdagradOptions>>& groups) : OptimizerOf("Adagrad") {
    add_groups(groups);
  }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"sum", nullptr, nullptr}; }
  void update(const UpdateLists& lists, const Attrs& options) const override;
  double initial_state(const Attrs& options, size_t) const override {
    return options.get<AdagradOptions>().initial_accumulator;
  }
  bool takes_sparse(const Attrs& options) const override { return options.get<AdagradOptions>().weight_decay == 0; }
};

}  // namespace chorale::optim
