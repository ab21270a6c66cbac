#include "chorale/models/mlp.h"

#include "chorale/nn/activation.h"
#include "chorale/nn/linear.h"

namespace chorale::models {

nn::Sequential mlp(const std::vector<int64_t>& widths) {
  CHORALE_CHECK(widths.size() >= 2, "[mlp] expected at least an input and an output width, found ", widths.size());
  nn::Sequential layers;
  for (size_t i = 1; i < widths.size(); ++i) {
    if (i > 1) layers.add(nn::ReLU());
    layers.add(nn::Linear(widths[i - 1], widths[i]));
  }
  return layers;
}

}  // namespace chorale::models
