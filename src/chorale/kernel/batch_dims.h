// The batch of a product of matrices, as the engines of every device walk over it: one dimension that the engine takes
// itself, and loops around it. `Product` is an engine's description of one call.
#pragma once

#include <span>

#include "chorale/base/small_vector.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel {

// One dimension of the batch, and the steps of each operand along it.
struct BatchDim {
  int64_t size, a, b, c;
};
using BatchDims = SmallVector<BatchDim, 6>;

// Batch dimensions from the inside out, merged where all three operands walk on with one step.
inline BatchDims batch_dims(const Tensor& a, const Tensor& b, const Tensor& c) {
  BatchDims dims;
  const auto step = [&](const Tensor& x, int64_t d) -> int64_t {  // d counts from the last batch dimension
    const int64_t at = x.dims() - 3 - d;
    return at < 0 || x.sizes()[static_cast<size_t>(at)] == 1 ? 0 : x.strides()[static_cast<size_t>(at)];
  };
  for (int64_t d = 0; d < c.dims() - 2; ++d) {
    const BatchDim dim{c.sizes()[static_cast<size_t>(c.dims() - 3 - d)], step(a, d), step(b, d), step(c, d)};
    if (dim.size == 1) continue;
    if (!dims.empty()) {
      BatchDim& inner = dims.back();
      if (dim.a == inner.a * inner.size && dim.b == inner.b * inner.size && dim.c == inner.c * inner.size) {
        inner.size *= dim.size;
        continue;
      }
    }
    dims.push_back(dim);
  }
  return dims;
}

// Gives the innermost dimension to the engine and returns the others.
template <class Product>
std::span<const BatchDim> take_inner_batch(Product& p, const BatchDims& dims, bool may_be_tall = true) {
  const std::span<const BatchDim> outer(dims.data(), dims.size());
  if (outer.empty()) return outer;
  const BatchDim& inner = outer.front();
  if (inner.b == 0 && inner.a == p.m * p.a_row && inner.c == p.m * p.c_row && may_be_tall) {
    p.m *= inner.size;  // one matrix b for all of them: their rows are the rows of one tall matrix
  } else {
    p.batch = inner.size;
    p.a_batch = inner.a;
    p.b_batch = inner.b;
    p.c_batch = inner.c;
  }
  return outer.subspan(1);
}

// run(product) for each place in the outer dimensions.
template <class Product, class Run>
void for_each_batch(const Product& p, size_t in_bytes, size_t out_bytes, std::span<const BatchDim> outer,
                    const Run& run) {
  if (outer.empty()) return run(p);
  const BatchDim& dim = outer.back();
  const auto bytes = static_cast<int64_t>(in_bytes), c_bytes = static_cast<int64_t>(out_bytes);
  for (int64_t i = 0; i < dim.size; ++i) {
    Product piece = p;
    piece.a = static_cast<const std::byte*>(p.a) + i * dim.a * bytes;
    piece.b = static_cast<const std::byte*>(p.b) + i * dim.b * bytes;
    piece.c = static_cast<std::byte*>(p.c) + i * dim.c * c_bytes;
    for_each_batch(piece, in_bytes, out_bytes, outer.first(outer.size() - 1), run);
  }
}

}  // namespace chorale::kernel
