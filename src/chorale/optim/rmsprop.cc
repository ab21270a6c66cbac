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

void Rmsprop::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<RmspropOptions>();
  rmsprop_(lists, {.alpha = o.alpha,
                   .eps = o.eps,
                   .weight_decay = o.weight_decay,
                   .momentum = o.momentum,
                   .centered = o.centered,
                   .maximize = o.maximize});
}

}  // namespace chorale::optim
