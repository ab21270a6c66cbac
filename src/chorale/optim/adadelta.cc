#include "chorale/optim/adadelta.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Adadelta::check(const Attrs& attrs) const {
  const auto& o = attrs.get<AdadeltaOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_decay(name(), "rho", o.rho);
  check_not_negative(name(), "eps", o.eps);
  check_not_negative(name(), "weight_decay", o.weight_decay);
}

void Adadelta::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<AdadeltaOptions>();
  adadelta_(lists, {.rho = o.rho, .eps = o.eps, .weight_decay = o.weight_decay, .maximize = o.maximize});
}

}  // namespace chorale::optim
