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

Optimizer::Recipe Adagrad::recipe(const Attrs& attrs, int64_t step) const {
  const auto& o = attrs.get<AdagradOptions>();
  Recipe recipe;
  recipe.rule = vec::UpdateRule::kAdagrad;
  recipe.params.sign = o.maximize ? -1 : 1;
  recipe.params.weight_decay = o.weight_decay;
  recipe.params.rate = o.lr / (1 + static_cast<double>(step - 1) * o.lr_decay);
  recipe.params.eps = o.eps;
  return recipe;
}

}  // namespace chorale::optim
