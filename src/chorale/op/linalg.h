// Factorisations and triangular systems over batches of matrices (the last two dimensions); f32 and f64.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale {

// The lower triangular l with a = l l^T, or the upper u with a = u^T u. Only that triangle of the symmetric a is read.
// InvalidArgument names the leading minor that is not positive.
Tensor cholesky(const Tensor& a, bool upper = false);

// x with a x = b, or x a = b (left = false). Only the triangle of a that counts is read; with `unitriangular` its
// diagonal is taken as ones. Batch dimensions broadcast.
Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left = true, bool unitriangular = false);

struct Qr {
  Tensor q;  // [..., m, min(m, n)], orthonormal columns
  Tensor r;  // [..., min(m, n), n], upper triangular
};
// a = q r. Differentiable for m >= n, where the columns of a are independent.
Qr qr(const Tensor& a);

}  // namespace chorale
