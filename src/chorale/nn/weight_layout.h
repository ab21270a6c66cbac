// What code that splits a layer over ranks asks of it (parallel/tensor_parallel.h), where it is not plain to see.
#pragma once

#include <cstdint>

namespace chorale::nn {

struct WeightLayout {
  int64_t output_dim = 0;  // the dimension of `weight` that is the layer's output: 0 of a Linear's [out, in]
  // How many layers of one input are one behind the other in it: 3 for queries, keys and values. Each is split.
  int64_t pieces = 1;
};

// A module whose `weight` is a matrix derives from this, too. Linear and Embedding are known without.
class SaysWeightLayout {
 public:
  virtual WeightLayout weight_layout() const = 0;

 protected:
  SaysWeightLayout() = default;
  SaysWeightLayout(const SaysWeightLayout&) = default;
  SaysWeightLayout& operator=(const SaysWeightLayout&) = default;
  ~SaysWeightLayout() = default;
};

}  // namespace chorale::nn
