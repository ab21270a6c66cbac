#include "chorale/optim/radam.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Radam::check(const Attrs& attrs) const {
  const auto& o = attrs.get<RadamOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_decay(name(), "beta1", o.beta1);
  check_decay(name(), "beta2", o.beta2);
  check_not_negative(name(), "eps", o.eps);
  check_not_negative(name(), "weight_decay", o.weight_decay);
}

void Radam::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<RadamOptions>();
  radam_(lists, {.beta1 = o.beta1,
                 .beta2 = o.beta2,
                 .eps = o.eps,
                 .weight_decay = o.weight_decay,
                 .decoupled = o.decoupled,
                 .maximize = o.maximize});
}

}  // namespace chorale::optim
