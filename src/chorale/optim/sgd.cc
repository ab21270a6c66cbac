#include "chorale/optim/sgd.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Sgd::check(const Attrs& attrs) const {
  const auto& o = attrs.get<SgdOptions>();
  check_not_negative("Sgd", "lr", o.lr);
  check_not_negative("Sgd", "momentum", o.momentum);
  check_not_negative("Sgd", "weight_decay", o.weight_decay);
  CHORALE_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0),
                "[Sgd] nesterov needs a momentum and no dampening, found momentum = ", o.momentum,
                ", dampening = ", o.dampening);
}

Optimizer::StateNames Sgd::states(const Attrs& attrs) const {
  return {attrs.get<SgdOptions>().momentum != 0 ? "momentum_buffer" : nullptr, nullptr, nullptr};
}

Optimizer::Recipe Sgd::recipe(const Attrs& attrs, int64_t step) const {
  const auto& o = attrs.get<SgdOptions>();
  Recipe recipe;
  recipe.rule = o.nesterov        ? vec::UpdateRule::kSgdNesterov
                : o.momentum != 0 ? vec::UpdateRule::kSgdMomentum
                                  : vec::UpdateRule::kSgd;
  recipe.params.sign = o.maximize ? -1 : 1;
  recipe.params.weight_decay = o.weight_decay;
  recipe.params.rate = o.lr;
  recipe.params.decay1 = o.momentum;
  recipe.params.gain1 = step == 1 ? 1 : 1 - o.dampening;
  return recipe;
}

bool Sgd::takes_sparse(const Attrs& attrs) const {
  const auto& o = attrs.get<SgdOptions>();
  return o.momentum == 0 && o.weight_decay == 0;
}

}  // namespace chorale::optim
