#include "chorale/models/formula_test_util.h"

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/op/samples.h"

namespace chorale::models {

void fill_by_formula(const nn::Module& model) {
  const NoGrad quiet;
  int seed = 100;
  for (const auto& [name, p] : model.named_parameters()) {
    const double bound =
        p.dims() > 1 ? std::sqrt(static_cast<double>(p.size(0)) / static_cast<double>(p.elems())) : 0.1;
    const bool factor = p.dims() == 1 && name.ends_with("weight");
    copy_(p, op::sample(p.sizes(), seed++, factor ? 0.5 : -bound, factor ? 1.5 : bound));
  }
}

}  // namespace chorale::models
