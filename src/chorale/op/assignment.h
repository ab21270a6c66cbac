// x += y and its like, in place. There is no x[i]: select(x, 0, i) is a view of it.
#pragma once

#include "chorale/op/pointwise.h"

namespace chorale {

inline const Tensor& operator+=(const Tensor& x, const Tensor& y) { return add_(x, y); }
inline const Tensor& operator+=(const Tensor& x, Scalar y) { return add_(x, y); }
inline const Tensor& operator-=(const Tensor& x, const Tensor& y) { return sub_(x, y); }
inline const Tensor& operator-=(const Tensor& x, Scalar y) { return sub_(x, y); }
inline const Tensor& operator*=(const Tensor& x, const Tensor& y) { return mul_(x, y); }
inline const Tensor& operator*=(const Tensor& x, Scalar y) { return mul_(x, y); }
inline const Tensor& operator/=(const Tensor& x, const Tensor& y) { return div_(x, y); }
inline const Tensor& operator/=(const Tensor& x, Scalar y) { return div_(x, y); }

}  // namespace chorale
