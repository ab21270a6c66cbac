#include "chorale/data/collate.h"

#include <algorithm>

#include "chorale/op/shape.h"

namespace chorale::data {

Tensor collate(const std::vector<Tensor>& parts) {
  CHORALE_CHECK(!parts.empty(), "[collate] a batch needs at least one example");
  const auto undefined = std::count_if(parts.begin(), parts.end(), [](const Tensor& x) { return !x.defined(); });
  if (undefined == static_cast<int64_t>(parts.size())) return {};
  CHORALE_CHECK(undefined == 0, "[collate] ", undefined, " of ", parts.size(), " tensors are undefined");
  for (size_t i = 1; i < parts.size(); ++i) {
    CHORALE_CHECK(parts[i].sizes() == parts[0].sizes() && parts[i].dtype() == parts[0].dtype(), "[collate] example ", i,
                  " of the batch is ", parts[i].dtype(), " ", parts[i].sizes(), ", but the first is ", parts[0].dtype(),
                  " ", parts[0].sizes(), "; pad or crop in the data set, or overload collate for its example type");
  }
  return stack(parts);
}

Example collate(const std::vector<Example>& examples) {
  std::vector<Tensor> x, y;
  for (const Example& example : examples) {
    x.push_back(example.x);
    y.push_back(example.y);
  }
  return {collate(x), collate(y)};
}

}  // namespace chorale::data
