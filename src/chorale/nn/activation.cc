#include "chorale/nn/activation.h"

#include "chorale/api/api.h"
#include "chorale/op/need_defined.h"

namespace chorale::nn {

Tensor GLU::forward(const Tensor& x) const {
  op::need_defined("GLU", "x", x);
  const int64_t dim = normalize_dim("GLU", dim_, x.dims());
  CHORALE_CHECK(x.size(dim) % 2 == 0, "[GLU] expected an even size in dimension ", dim, ", found shape ", x.sizes());
  const int64_t half = x.size(dim) / 2;
  return narrow(x, dim, 0, half) * sigmoid(narrow(x, dim, half, half));
}

PReLU::PReLU(int64_t num_parameters, double init) : weight(full({num_parameters}, init)) {}

Tensor PReLU::forward(const Tensor& x) const {
  op::need_defined("PReLU", "x", x);
  Tensor slope = weight;
  if (weight.elems() > 1) {
    CHORALE_CHECK(x.dims() >= 2 && x.size(1) == weight.elems(), "[PReLU] expected ", weight.elems(),
                  " channels in dimension 1, found shape ", x.sizes());
    Shape shape(static_cast<size_t>(x.dims()), 1);
    shape[1] = weight.elems();
    slope = view(weight, shape);
  }
  return relu(x) - slope * relu(neg(x));
}

}  // namespace chorale::nn
