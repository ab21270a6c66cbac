// Which gradients go into which bucket.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::reducer {

// A gradient, as far as its place in a bucket is concerned.
struct BucketItem {
  size_t bytes = 0;
  DType dtype = DType::kF32;
  Device device{};
  bool own_bucket = false;  // a sparse gradient is never joined with others
};

struct BucketAssignment {
  std::vector<std::vector<size_t>> buckets;  // indices of items
  std::vector<size_t> limits;                // the one that each bucket was filled to, in bytes
};

// Walks the items and puts those of one dtype and device together until a bucket has reached its limit; it may exceed
// it by the last item. Each dtype and device has its own row of limits, of which the last repeats. Buckets come in the
// order of their smallest index; with an `order` of walking (a permutation of the indices), in the order in which they
// were filled.
BucketAssignment assign_buckets(std::span<const BucketItem> items, std::span<const size_t> limits,
                                std::span<const size_t> order = {});
// The tensors are as large as the gradients. StateError for a sparse one.
BucketAssignment assign_buckets(std::span<const Tensor> tensors, std::span<const size_t> limits);

}  // namespace chorale::reducer
