// What tests of ZeRO share: parameters, and comparing them.
#pragma once

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/op/samples.h"

namespace chorale::zero {

inline NamedTensors parameters_of(const std::vector<int64_t>& sizes, Device device = kCpu) {
  NamedTensors parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.emplace_back(concat("p", i), set_requires_grad(to(op::sample({sizes[i]}, static_cast<int>(i)), device)));
  }
  return parameters;
}

inline void expect_equal(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_EQ(a[i].second.to_vector<double>(), b[i].second.to_vector<double>()) << a[i].first;
}

}  // namespace chorale::zero
