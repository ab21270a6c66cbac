// Comparing tensors with numbers computed the slow way.
#pragma once

#include <cmath>

#include "chorale/op/copy.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/op/view.h"

namespace chorale {

inline void expect_near(const Tensor& actual, const Tensor& expected, double tolerance, const std::string& what = "") {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const auto a = values(actual), b = values(expected);
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    ASSERT_LE(std::abs(a[i] - b[i]), tolerance * (1 + std::abs(b[i])))
        << what << ": element " << i << " of " << actual.sizes() << " is " << a[i] << ", expected " << b[i];
  }
}
inline void expect_values(const Tensor& actual, const std::vector<double>& expected, double tolerance = 1e-12) {
  expect_near(reshape(actual, {-1}), Tensor::from(expected, {static_cast<int64_t>(expected.size())}), tolerance);
}

// The same values with the channels innermost in memory.
inline Tensor channels_last(const Tensor& x) {
  const Tensor copy = Tensor::empty_strided(x.sizes(), channels_last_strides(x.sizes()), x.dtype());
  copy_(copy, x);
  return copy;
}

inline Tensor as(const Tensor& x, DType dtype) { return to(x, dtype); }

}  // namespace chorale
