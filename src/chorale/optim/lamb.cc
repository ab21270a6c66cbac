#include "chorale/optim/lamb.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Lamb::check(const Attrs& attrs) const {
  const auto& o = attrs.get<LambOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_decay(name(), "beta1", o.beta1);
  check_decay(name(), "beta2", o.beta2);
  check_not_negative(name(), "eps", o.eps);
  check_not_negative(name(), "weight_decay", o.weight_decay);
}

void Lamb::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<LambOptions>();
  lamb_(lists,
        {.beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay, .maximize = o.maximize});
}

}  // namespace chorale::optim
