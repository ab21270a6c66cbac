// The models that benchmarks of training use, with a batch (docs/dev/bench.md).
#pragma once

#include <string>

#include "chorale/api/api.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/mlp.h"

namespace chorale::app {

// Calls use(model, inputs, targets).
template <class Use>
void with_bench_model(const std::string& name, const Use& use) {
  if (name == "tinymlp") {
    use(models::mlp({20, 32, 10}), normal({8, 20}), zeros({8}, DType::kI64));
  } else if (name == "mlp512x4") {
    use(models::mlp({512, 512, 512, 512, 512, 10}), normal({32, 512}), randint(0, 10, {32}));
  } else if (name == "cnn_fashion") {
    use(models::fashion_cnn(), normal({32, 1, 28, 28}), randint(0, 10, {32}));
  } else {
    const Tensor ids = randint(0, 8192, {8, 128});
    use(models::Encoder(), ids, flatten(ids));
  }
}

// The classes of their last layer.
inline int64_t classes_of(const std::string& name) { return name == "bert_256x4" ? 8192 : 10; }

// A step's loss.
template <class Forward>
Tensor bench_loss(Forward& forward, const Tensor& x, const Tensor& target) {
  const Tensor y = forward(x);
  return cross_entropy(y.dims() > 2 ? flatten(y, 0, -2) : y, target);
}

}  // namespace chorale::app
