#include "chorale/optim/asgd.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Asgd::check(const Attrs& attrs) const {
  const auto& o = attrs.get<AsgdOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_not_negative(name(), "lambd", o.lambd);
  check_not_negative(name(), "alpha", o.alpha);
  check_not_negative(name(), "t0", o.t0);
  check_not_negative(name(), "weight_decay", o.weight_decay);
}

void Asgd::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<AsgdOptions>();
  asgd_(lists,
        {.lambd = o.lambd, .alpha = o.alpha, .t0 = o.t0, .weight_decay = o.weight_decay, .maximize = o.maximize});
}

}  // namespace chorale::optim
