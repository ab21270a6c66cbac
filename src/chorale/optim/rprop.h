#pragma once

#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct RpropOptions {
  double lr = 0.01;          // the first step of every element
  double shrink = 0.5;       // of a step when the gradient's sign has changed,
  double grow = 1.2;         // and when it has not
  double least_step = 1e-6;  // bounds of a step
  double most_step = 50;
  bool maximize = false;
};
CHORALE_FIELDS(RpropOptions, lr, shrink, grow, least_step, most_step, maximize)

// Only the sign of a gradient counts; how far each element goes depends on whether its sign has changed (Riedmiller and
// Braun). It is meant for whole batches.
class Rprop final : public OptimizerOf<RpropOptions> {
 public:
  explicit Rprop(const NamedTensors& parameters, const RpropOptions& options = {}) : Rprop({{parameters, options}}) {}
  explicit Rprop(const std::vector<ParameterGroup<RpropOptions>>& groups) : OptimizerOf("Rprop") { add_groups(groups); }

 private:
  void check(const Attrs& options) const override;
  StateNames states(const Attrs&) const override { return {"prev", "step_size", nullptr}; }
  double initial_state(const Attrs& options, size_t place) const override;
  void update(const UpdateLists& lists, const Attrs& options) const override;
};

}  // namespace chorale::optim
