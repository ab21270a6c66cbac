// Reductions over any set of dimensions: an empty list means all of them, negative ones count from the end. With
// keepdim a reduced dimension stays with size 1. f16 and bf16 accumulate in f32, and the error of a sum grows with the
// logarithm of its length. Results do not depend on the number of threads.
#pragma once

#include <optional>

#include "chorale/op/op_def.h"

namespace chorale {

struct ValuesIndices {
  Tensor values;
  Tensor indices;  // i64, along the dimension
};

// Integers and bool are summed (multiplied) in i64. With a dtype, the elements are converted first where it is wider.
Tensor sum(const Tensor& x, const IntList& dims = {}, bool keepdim = false, std::optional<DType> dtype = {});
Tensor prod(const Tensor& x, const IntList& dims = {}, bool keepdim = false, std::optional<DType> dtype = {});
// The mean of integers needs a floating dtype. The mean of nothing is NaN.
Tensor mean(const Tensor& x, const IntList& dims = {}, bool keepdim = false, std::optional<DType> dtype = {});

// Largest and smallest element; NaN wins. The gradient is shared evenly among equal extremes.
Tensor amax(const Tensor& x, const IntList& dims = {}, bool keepdim = false);
Tensor amin(const Tensor& x, const IntList& dims = {}, bool keepdim = false);
Tensor max(const Tensor& x);
Tensor min(const Tensor& x);
// The same with the index of the first one, which alone gets the gradient.
ValuesIndices max(const Tensor& x, int64_t dim, bool keepdim = false);
ValuesIndices min(const Tensor& x, int64_t dim, bool keepdim = false);
// The index of the first extreme along a dimension, or in the flattened tensor.
Tensor argmax(const Tensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);
Tensor argmin(const Tensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);

Tensor any(const Tensor& x, const IntList& dims = {}, bool keepdim = false);
Tensor all(const Tensor& x, const IntList& dims = {}, bool keepdim = false);
Tensor count_nonzero(const Tensor& x, const IntList& dims = {});

// (sum |x|^p)^(1/p) of the elements as one vector; p may be infinite (the largest or smallest |x|) or 0 (how many are
// not zero). Real for complex x. Its gradient at the zero vector is 0.
Tensor norm(const Tensor& x, double p = 2, const IntList& dims = {}, bool keepdim = false);

// Variance and standard deviation: squares are divided by count - correction. (`std` is taken.)
Tensor var(const Tensor& x, const IntList& dims = {}, bool keepdim = false, double correction = 1);
Tensor stddev(const Tensor& x, const IntList& dims = {}, bool keepdim = false, double correction = 1);

// log(sum(exp(x))) without overflow; -inf for nothing.
Tensor logsumexp(const Tensor& x, const IntList& dims = {}, bool keepdim = false);

// Running sums and products along one dimension.
Tensor cumsum(const Tensor& x, int64_t dim, std::optional<DType> dtype = {});
Tensor cumprod(const Tensor& x, int64_t dim, std::optional<DType> dtype = {});

// The inverse of broadcasting: sums x to `shape`, which must broadcast to x's shape; x itself when it has it already.
Tensor sum_to(const Tensor& x, const Shape& shape);

}  // namespace chorale
