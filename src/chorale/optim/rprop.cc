#include "chorale/optim/rprop.h"

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
  rprop_(lists, {.shrink = o.shrink,
                 .grow = o.grow,
                 .least_step = o.least_step,
                 .most_step = o.most_step,
                 .maximize = o.maximize});
}

}  // namespace chorale::optim
