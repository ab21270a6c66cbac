// Reading what PyTorch gave (tests/oracle/*.json) and comparing with it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "chorale/tensor/tensor.h"

namespace chorale::nn::oracle {

using Json = nlohmann::json;

// tests/oracle/NAME, looked for above the working directory.
Json read_oracle(const std::string& name);

// The formula for weights: f64 in [0.5, 1.5).
Tensor weights(const Shape& sizes, int seed);

// Compares shape, a few values and the weighted sum (record_modules.py, brief). An undefined tensor is zeros, and
// `expected` is null where PyTorch has no gradient.
void compare(const Tensor& tensor, const Json& expected, double tolerance, const std::string& what);

}  // namespace chorale::nn::oracle
