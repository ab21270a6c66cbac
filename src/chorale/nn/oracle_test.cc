// Our modules against what PyTorch's compute (tools/oracle/record_modules.py), which need not be there.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "chorale/nn/nn.h"
#include "chorale/nn/oracle_cases_test_util.h"
#include "chorale/op/samples.h"

namespace chorale::nn::oracle {
namespace {

using Json = nlohmann::json;

Json recorded() {
  for (auto at = std::filesystem::current_path();; at = at.parent_path()) {
    std::ifstream file(at / "tests" / "oracle" / "modules.json");
    if (file) return Json::parse(file);
    if (at == at.root_path()) throw std::runtime_error("no tests/oracle/modules.json above the working directory");
  }
}

Tensor weights(const Shape& sizes, int seed) { return op::sample(sizes, seed, 0.5, 1.5); }

Tensor weighted(const std::vector<Tensor>& tensors, int seed) {
  Tensor total = zeros({}, DType::kF64);
  for (const Tensor& x : tensors) total = total + sum(x * weights(x.sizes(), seed++));
  return total;
}

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

// The recorder's values, written without a record.
void fill(Module& module) {
  const NoGrad quiet;
  int seed = 100;
  for (const auto& [name, parameter] : module.named_parameters()) {
    copy_(parameter, op::sample(parameter.sizes(), seed++, -0.5, 0.5));
  }
  seed = 300;
  for (const auto& [name, buffer] : module.named_buffers()) {
    if (is_floating(buffer.dtype())) copy_(buffer, weights(buffer.sizes(), seed));
    ++seed;
  }
}

void check_members(const Module& module, const Json& expected, double tolerance) {
  const NamedTensors parameters = module.named_parameters(), buffers = module.named_buffers();
  ASSERT_EQ(parameters.size(), expected["parameters"].size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Json& entry = expected["parameters"][i];
    EXPECT_EQ(parameters[i].first, entry[0].get<std::string>());
    EXPECT_EQ(parameters[i].second.sizes(), Shape(std::span<const int64_t>(entry[1].get<std::vector<int64_t>>())));
  }
  ASSERT_EQ(buffers.size(), expected["buffers"].size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Json& entry = expected["buffers"][i];
    EXPECT_EQ(buffers[i].first, entry[0].get<std::string>());
    compare(buffers[i].second, entry[1], tolerance, "buffer " + buffers[i].first);
  }
}

void check(const Case& test, const Json& expected) {
  const double tolerance = expected.value("tol", 1e-10);
  fill(*test.module);
  const std::vector<Tensor> out = test.run(test.in);
  ASSERT_EQ(out.size(), expected["out"].size());
  for (size_t i = 0; i < out.size(); ++i) compare(out[i], expected["out"][i], tolerance, "output " + std::to_string(i));
  check_members(*test.module, expected, tolerance);

  std::vector<Tensor> wanted;
  for (const Tensor& x : test.in) {
    if (requires_grad(x)) wanted.push_back(x);
  }
  for (const Tensor& parameter : test.module->parameters()) wanted.push_back(parameter);
  const bool twice = expected.contains("second");
  const std::vector<Tensor> first = grad({weighted(out, 1000)}, wanted, {.create_graph = twice, .allow_unused = true});
  ASSERT_EQ(first.size(), expected["grad"].size());
  for (size_t i = 0; i < first.size(); ++i)
    compare(first[i], expected["grad"][i], tolerance, "gradient " + std::to_string(i));
  if (!twice) return;
  std::vector<Tensor> there;
  for (const Json& i : expected["there"]) there.push_back(first[i.get<size_t>()]);
  // Where the first gradients are constant there is no way to the second ones, which must be zero then.
  const Tensor total = weighted(there, 2000);
  const std::vector<Tensor> second =
      requires_grad(total) ? grad({total}, wanted, {.allow_unused = true}) : std::vector<Tensor>(wanted.size());
  for (size_t i = 0; i < second.size(); ++i) {
    compare(second[i], expected["second"][i], tolerance, "second gradient " + std::to_string(i));
  }
}

TEST(ModuleOracle, ForwardGradientsAndBuffersAreThoseOfPyTorch) {
  Cases cases = layer_cases();
  cases.merge(sequence_cases());
  cases.merge(loss_cases());
  const Json file = recorded();
  ASSERT_EQ(cases.size(), file["cases"].size());
  for (const Json& expected : file["cases"]) {
    const auto name = expected["case"].get<std::string>();
    SCOPED_TRACE(name);
    const auto found = cases.find(name);
    ASSERT_NE(found, cases.end()) << "the oracle knows " << name << ", this test does not";
    try {
      check(found->second(), expected);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

}  // namespace
}  // namespace chorale::nn::oracle
