#include "chorale/nn/oracle_file_test_util.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "chorale/api/api.h"
#include "chorale/op/samples.h"

namespace chorale::nn::oracle {

Json read_oracle(const std::string& name) {
  for (auto at = std::filesystem::current_path();; at = at.parent_path()) {
    std::ifstream file(at / "tests" / "oracle" / name);
    if (file) return Json::parse(file);
    if (at == at.root_path()) throw std::runtime_error("no tests/oracle/" + name + " above the working directory");
  }
}

Tensor weights(const Shape& sizes, int seed) { return op::sample(sizes, seed, 0.5, 1.5); }

void compare(const Tensor& tensor, const Json& expected, double tolerance, const std::string& what) {
  if (expected.is_null()) {
    // No gradient and a gradient of zeros mean the same.
    EXPECT_TRUE(!tensor.defined() || !any(tensor).item<bool>()) << what << " is not zero";
    return;
  }
  const Shape sizes(std::span<const int64_t>(expected["s"].get<std::vector<int64_t>>()));
  const Tensor have = !tensor.defined() ? zeros(sizes, DType::kF64) : tensor.is_sparse() ? to_dense(tensor) : tensor;
  ASSERT_EQ(have.sizes(), sizes) << what;
  const auto values = have.to_vector<double>();
  const auto factors = weights({have.elems()}, 7).to_vector<double>();
  double total = 0, magnitude = 1;
  for (size_t i = 0; i < values.size(); ++i) {
    total += values[i] * factors[i];
    magnitude += std::abs(values[i]);
  }
  const size_t step = expected["step"];
  for (size_t i = 0; i < expected["v"].size(); ++i) {
    const double want = expected["v"][i], got = values.at(i * step);
    EXPECT_LE(std::abs(got - want), tolerance * std::max(1.0, std::abs(want)))
        << what << ": element " << i * step << " is " << got << ", PyTorch has " << want;
  }
  EXPECT_LE(std::abs(total - expected["sum"].get<double>()), tolerance * magnitude) << what << ": weighted sum";
}

}  // namespace chorale::nn::oracle
