// Sparse tensors (Tensor::sparse_coo): indices and values of the entries that are there. Ops take dense tensors only;
// these functions take a sparse one apart, work on its parts with ops, and put the result together, so that gradients
// flow to the values.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale {

// Entries of one place added up, places in row-major order; x itself when it is so already.
Tensor coalesce(const Tensor& x);
// x itself when it is dense.
Tensor to_dense(const Tensor& x);
// The sum of two sparse tensors (their entries side by side), or of a dense and a sparse one (dense). Both dense:
// add().
Tensor sparse_add(const Tensor& x, const Tensor& y);
// Adds to a dense tensor in place; returns it.
const Tensor& sparse_add_(const Tensor& dense, const Tensor& sparse);
Tensor sparse_scale(const Tensor& x, Scalar factor);

namespace op {
extern const OpDef kSparseCoalesce;
}

}  // namespace chorale
