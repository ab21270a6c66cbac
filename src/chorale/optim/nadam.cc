#include "chorale/optim/nadam.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Nadam::check(const Attrs& attrs) const {
  const auto& o = attrs.get<NadamOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_decay(name(), "beta1", o.beta1);
  check_decay(name(), "beta2", o.beta2);
  check_not_negative(name(), "eps", o.eps);
  check_not_negative(name(), "weight_decay", o.weight_decay);
  check_not_negative(name(), "momentum_decay", o.momentum_decay);
}

void Nadam::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<NadamOptions>();
  nadam_(lists, {.beta1 = o.beta1,
                 .beta2 = o.beta2,
                 .eps = o.eps,
                 .weight_decay = o.weight_decay,
                 .momentum_decay = o.momentum_decay,
                 .decoupled = o.decoupled,
                 .maximize = o.maximize});
}

}  // namespace chorale::optim
