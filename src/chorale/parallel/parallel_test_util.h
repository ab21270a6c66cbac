// What tests of several ranks share.
#pragma once

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/nn/module.h"

namespace chorale::parallel {

// The spec's "equal": shape, dtype, and |a - b| <= atol + rtol |b| by dtype.
inline void expect_equal(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_TRUE(a.defined() && b.defined()) << what;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  double rtol = 0, atol = 0;
  switch (a.dtype()) {
    case DType::kF16:
      rtol = 1e-3, atol = 1e-5;
      break;
    case DType::kBF16:
      rtol = 1.6e-2, atol = 1e-5;
      break;
    case DType::kF32:
      rtol = 1.3e-6, atol = 1e-5;
      break;
    case DType::kF64:
      rtol = 1e-7, atol = 1e-7;
      break;
    default:
      break;
  }
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_LE(std::abs(x[i] - y[i]), atol + rtol * std::abs(y[i]))
        << what << ", element " << i << ": " << x[i] << " and " << y[i];
  }
}
inline void expect_equal_parameters(const nn::Module& a, const nn::Module& b, const std::string& what) {
  const auto x = a.named_parameters(), y = b.named_parameters();
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) expect_equal(x[i].second, y[i].second, what + ", " + x[i].first);
}

// The spec's "step": p + gradient, and gradients back to zero in place.
inline void ascend(const nn::Module& module) {
  const NoGrad quiet;
  for (const Tensor& p : module.parameters()) {
    if (!gradient(p).defined()) continue;
    add_(p, gradient(p));
    zero_(gradient(p));
  }
}

}  // namespace chorale::parallel
