#include "chorale/optim/rmsprop.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Rmsprop::check(const Attrs& attrs) const {
  const auto& o = attrs.get<RmspropOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_decay(name(), "alpha", o.alpha);
  check_not_negative(name(), "eps", o.eps);
  check_not_negative(name(), "weight_decay", o.weight_decay);
  check_not_negative(name(), "momentum", o.momentum);
}

Optimizer::StateNames Rmsprop::states(const Attrs& attrs) const {
  const auto& o = attrs.get<RmspropOptions>();
  return {"square_avg", o.momentum != 0 ? "momentum_buffer" : nullptr, o.centered ? "grad_avg" : nullptr};
}

Optimizer::Recipe Rmsprop::recipe(const Attrs& attrs, int64_t) const {
  using Rule = vec::UpdateRule;
  const auto& o = attrs.get<RmspropOptions>();
  Recipe recipe;
  recipe.rule = o.momentum != 0 ? (o.centered ? Rule::kRmspropCenteredMomentum : Rule::kRmspropMomentum)
                                : (o.centered ? Rule::kRmspropCentered : Rule::kRmsprop);
  recipe.params.sign = o.maximize ? -1 : 1;
  recipe.params.weight_decay = o.weight_decay;
  recipe.params.rate = o.lr;
  recipe.params.decay1 = o.momentum;
  recipe.params.decay2 = o.alpha;
  recipe.params.gain2 = 1 - o.alpha;
  recipe.params.eps = o.eps;
  return recipe;
}

}  // namespace chorale::optim
