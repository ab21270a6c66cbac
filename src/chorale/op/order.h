// Order: sorting, the largest few, distinct values, places in a sorted list, counts. NaN counts as larger than every
// number.
#pragma once

#include "chorale/op/op_def.h"
#include "chorale/op/reduce.h"

namespace chorale {

// Sorts along a dimension; the indices are those that the values had. Equal elements keep their order.
ValuesIndices sort(const Tensor& x, int64_t dim = -1, bool descending = false);
Tensor argsort(const Tensor& x, int64_t dim = -1, bool descending = false);

// The k largest (smallest) along a dimension, in order; of equal elements those that come first.
ValuesIndices topk(const Tensor& x, int64_t k, int64_t dim = -1, bool largest = true);

struct Unique {
  Tensor values;   // in order; each NaN for itself
  Tensor inverse;  // for each element of x, where its value is; empty unless asked for
  Tensor counts;   // how often each value occurs; empty unless asked for
};
// The distinct values of x, whatever its shape.
Unique unique(const Tensor& x, bool return_inverse = false, bool return_counts = false);

// Where each value would have to be inserted to keep `boundaries` sorted: before equal ones, or behind them (right).
// Boundaries are one list, or one for each row of values.
Tensor searchsorted(const Tensor& boundaries, const Tensor& values, bool right = false);

// How often each integer from 0 up occurs in a vector, or the sum of the weights there; at least `minlength` counts.
// InvalidArgument for a negative one.
Tensor bincount(const Tensor& x, const Tensor& weights = {}, int64_t minlength = 0);

}  // namespace chorale
