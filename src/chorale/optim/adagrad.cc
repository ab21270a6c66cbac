#include "chorale/optim/adagrad.h"

#include "chorale/optim/check.h"

namespace chorale::optim {

void Adagrad::check(const Attrs& attrs) const {
  const auto& o = attrs.get<AdagradOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_not_negative(name(), "lr_decay", o.lr_decay);
  check_not_negative(name(), "weight_decay", o.weight_decay);
  check_not_negative(name(), "initial_accumulator", o.initial_accumulator);
  check_not_negative(name(), "eps", o.eps);
}

void Adagrad::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<AdagradOptions>();
  adagrad_(lists, {.lr_decay = o.lr_decay, .weight_decay = o.weight_decay, .eps = o.eps, .maximize = o.maximize});
}

}  // namespace chorale::optim
