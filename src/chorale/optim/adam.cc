#include "chorale/optim/adam.h"

#include <cmath>

#include "chorale/optim/check.h"

namespace chorale::optim {
namespace {
template <class Options>
constexpr bool kDecoupled = std::is_same_v<Options, AdamWOptions>;
}

template <class Options>
AdamOf<Options>::AdamOf(const std::vector<ParameterGroup<Options>>& groups)
    : OptimizerOf<Options>(kDecoupled<Options> ? "AdamW" : "Adam") {
  this->add_groups(groups);
}

template <class Options>
void AdamOf<Options>::check(const Attrs& attrs) const {
  const auto& o = attrs.get<Options>();
  check_not_negative(this->name(), "lr", o.lr);
  check_decay(this->name(), "beta1", o.beta1);
  check_decay(this->name(), "beta2", o.beta2);
  check_not_negative(this->name(), "eps", o.eps);
  check_not_negative(this->name(), "weight_decay", o.weight_decay);
}

template <class Options>
Optimizer::StateNames AdamOf<Options>::states(const Attrs& attrs) const {
  return {"exp_avg", "exp_avg_sq", attrs.get<Options>().amsgrad ? "max_exp_avg_sq" : nullptr};
}

template <class Options>
Optimizer::Recipe AdamOf<Options>::recipe(const Attrs& attrs, int64_t step) const {
  const auto& o = attrs.get<Options>();
  const auto t = static_cast<double>(step);
  Recipe recipe;
  recipe.rule = o.amsgrad ? vec::UpdateRule::kAmsgrad : vec::UpdateRule::kAdam;
  recipe.params.sign = o.maximize ? -1 : 1;
  (kDecoupled<Options> ? recipe.params.keep : recipe.params.weight_decay) =
      kDecoupled<Options> ? 1 - o.lr * o.weight_decay : o.weight_decay;
  recipe.params.rate = o.lr / (1 - std::pow(o.beta1, t));
  recipe.params.gain1 = 1 - o.beta1;
  recipe.params.decay2 = o.beta2;
  recipe.params.gain2 = 1 - o.beta2;
  recipe.params.root_scale = 1 / std::sqrt(1 - std::pow(o.beta2, t));
  recipe.params.eps = o.eps;
  return recipe;
}

template class AdamOf<AdamOptions>;
template class AdamOf<AdamWOptions>;

}  // namespace chorale::optim
