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

// w -= lr * b, where b = momentum * b + (1 - dampening) * g and g = gradient + weight_decay * w. With nesterov the step
// looks ahead: w -= lr * (g + momentum * b). The row is update_sgd, one pass over all parameters (op/defs/update.cc);
// its loop is in vec/update.cc.
void Sgd::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<SgdOptions>();
  sgd_(lists, {.momentum = o.momentum,
               .dampening = o.dampening,
               .weight_decay = o.weight_decay,
               .nesterov = o.nesterov,
               .maximize = o.maximize});
}

bool Sgd::takes_sparse(const Attrs& attrs) const {
  const auto& o = attrs.get<SgdOptions>();
  return o.momentum == 0 && o.weight_decay == 0;
}

}  // namespace chorale::optim
