#include "chorale/optim/adam.h"

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
void AdamOf<Options>::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<Options>();
  adam_(lists, {.beta1 = o.beta1,
                .beta2 = o.beta2,
                .eps = o.eps,
                .weight_decay = o.weight_decay,
                .decoupled = kDecoupled<Options>,
                .amsgrad = o.amsgrad,
                .maximize = o.maximize});
}

template class AdamOf<AdamOptions>;
template class AdamOf<AdamWOptions>;

}  // namespace chorale::optim
