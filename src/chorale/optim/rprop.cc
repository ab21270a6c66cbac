#include "chorale/optim/rprop.h"

#include "chorale/op/functions.h"
#include "chorale/optim/check.h"

namespace chorale::optim {

void Rprop::check(const Attrs& attrs) const {
  const auto& o = attrs.get<RpropOptions>();
  check_not_negative(name(), "lr", o.lr);
  CHORALE_CHECK(o.shrink > 0 && o.shrink < 1 && o.grow > 1, "[Rprop] a step shrinks by a factor between 0 and 1 and ",
                "grows by one above 1, not by ", o.shrink, " and ", o.grow);
  CHORALE_CHECK(o.least_step >= 0 && o.least_step <= o.most_step, "[Rprop] steps cannot be at least ", o.least_step,
                " and at most ", o.most_step);
}

double Rprop::initial_state(const Attrs& attrs, size_t place) const {
  return place == 1 ? attrs.get<RpropOptions>().lr : 0;
}

void Rprop::update(const UpdateLists& lists, const Attrs& attrs) const {
  const auto& o = attrs.get<RpropOptions>();
  for (size_t i = 0; i < lists.size(); ++i) {
    const Tensor &before = lists.states[0][i], &step = lists.states[1][i];
    const Tensor g = o.maximize ? neg(lists.gradients[i]) : lists.gradients[i];
    const Tensor turned = mul(g, before), same = ones_like(step);
    const Tensor factor = where(gt(turned, 0), mul(same, o.grow), where(lt(turned, 0), mul(same, o.shrink), same));
    copy_(step, clamp(mul(step, factor), mul(same, o.least_step), mul(same, o.most_step)));
    // An element whose sign has changed waits for one step.
    copy_(before, where(lt(turned, 0), mul(same, 0), g));
    sub_(lists.parameters[i], mul(sign(before), step));
  }
}

}  // namespace chorale::optim
