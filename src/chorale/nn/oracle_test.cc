// Our modules against what PyTorch's compute (tools/oracle/record_modules.py), which need not be there.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "chorale/nn/nn.h"
#include "chorale/nn/oracle_cases_test_util.h"
#include "chorale/nn/oracle_file_test_util.h"
#include "chorale/op/samples.h"

namespace chorale::nn::oracle {
namespace {

Tensor weighted(const std::vector<Tensor>& tensors, int seed) {
  Tensor total = zeros({}, DType::kF64);
  for (const Tensor& x : tensors) total = total + sum(x * weights(x.sizes(), seed++));
  return total;
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
  const Json file = read_oracle("modules.json");
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
