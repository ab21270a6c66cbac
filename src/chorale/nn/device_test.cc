// Modules on a device: those that are made there, moved there, or made without memory and filled there have the CPU's
// bits. The simulated device runs the CPU's kernels, late, on memory that the host cannot touch.
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/nn/nn.h"
#include "chorale/nn/oracle_cases_test_util.h"
#include "chorale/op/device_scope.h"
#include "chorale/op/samples.h"

namespace chorale::nn::oracle {
namespace {

constexpr Device kSim{DeviceType::kSim, 0};

class ModulesOnADevice : public testing::Test {
 protected:
  void SetUp() override {
    eager::add_sim_device({.most_delay = std::chrono::microseconds(5)});
    threads_ = thread_count();
    set_thread_count(1);  // as kernels of the device do: sums are cut by the number of threads
  }
  void TearDown() override { set_thread_count(threads_); }

 private:
  int threads_ = 1;
};

Case made_on(Device device, const std::function<Case()>& make) {
  const DeviceScope scope(device);
  manual_seed(3);
  return make();
}

void expect_to_be_on(Device device, const Module& module) {
  for (const auto& [name, x] : module.named_parameters()) EXPECT_EQ(x.device(), device) << name;
  for (const auto& [name, x] : module.named_buffers()) EXPECT_EQ(x.device(), device) << name;
}

using Values = std::vector<std::pair<std::string, std::vector<double>>>;

Values values_of(const NamedTensors& tensors) {
  Values values;
  for (const auto& [name, x] : tensors) values.emplace_back(name, x.to_vector<double>());
  return values;
}

// Results, gradients of inputs and parameters, and what is in the module then.
Values trained_on(Device device, const Case& test) {
  std::vector<Tensor> in, wanted;
  for (const Tensor& x : test.in) {
    in.push_back(to(detach(x), device));
    if (requires_grad(x)) wanted.push_back(set_requires_grad(in.back()));
  }
  for (const Tensor& parameter : test.module->parameters()) wanted.push_back(parameter);
  NamedTensors all;
  std::vector<Tensor> roots;
  GradOptions options{.allow_unused = true};
  for (const Tensor& y : test.run(in)) {
    EXPECT_EQ(y.device(), device);
    all.emplace_back("result", y);
    if (!requires_grad(y)) continue;
    roots.push_back(y);
    options.grad_outputs.push_back(to(to(op::sample(y.sizes(), 7), y.dtype()), device));
  }
  if (!wanted.empty()) {
    for (const Tensor& g : grad(roots, wanted, options)) {
      if (!g.defined()) {
        all.emplace_back("no gradient", zeros({1}));
        continue;
      }
      EXPECT_EQ(g.device(), device);
      all.emplace_back("gradient", g.is_sparse() ? to_dense(g) : g);
    }
  }
  const NamedTensors state = test.module->state_dict();
  all.insert(all.end(), state.begin(), state.end());
  return values_of(all);
}

TEST_F(ModulesOnADevice, HaveTheBitsOfTheCpuHoweverTheyGotThere) {
  Cases cases = layer_cases();
  cases.merge(sequence_cases());
  cases.merge(loss_cases());
  for (const auto& [name, make] : cases) {
    SCOPED_TRACE(name);
    try {
      const Case here = made_on(kCpu, make), there = made_on(kSim, make), moved = made_on(kCpu, make),
                 filled = made_on(kNull, make);
      const NamedTensors begun = here.module->state_dict();
      NamedTensors copies;
      for (const auto& [key, x] : begun) copies.emplace_back(key, clone(x));

      expect_to_be_on(kSim, *there.module);
      EXPECT_EQ(values_of(there.module->state_dict()), values_of(begun)) << "what a module begins with";
      moved.module->to(kSim);
      expect_to_be_on(kSim, *moved.module);
      expect_to_be_on(kNull, *filled.module);
      filled.module->materialize(kSim);
      expect_to_be_on(kSim, *filled.module);
      filled.module->load_state_dict(copies);

      const Values expected = trained_on(kCpu, here);
      EXPECT_EQ(trained_on(kSim, there), expected);
      EXPECT_EQ(trained_on(kSim, moved), expected);
      EXPECT_EQ(trained_on(kSim, filled), expected);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST_F(ModulesOnADevice, InitialisersDrawTheSameNumbersWhereverTheWeightIs) {
  const std::pair<const char*, std::function<void(const Tensor&, Generator&)>> initialisers[] = {
      {"uniform", [](const Tensor& x, Generator& g) { init::uniform_(x, -1, 2, g); }},
      {"normal", [](const Tensor& x, Generator& g) { init::normal_(x, 1, 2, g); }},
      {"trunc_normal", [](const Tensor& x, Generator& g) { init::trunc_normal_(x, 0, 1, -2, 2, g); }},
      {"xavier_uniform", [](const Tensor& x, Generator& g) { init::xavier_uniform_(x, 1, g); }},
      {"xavier_normal", [](const Tensor& x, Generator& g) { init::xavier_normal_(x, 1, g); }},
      {"kaiming_uniform", [](const Tensor& x, Generator& g) { init::kaiming_uniform_(x, {}, g); }},
      {"kaiming_normal", [](const Tensor& x, Generator& g) { init::kaiming_normal_(x, {}, g); }},
      {"orthogonal", [](const Tensor& x, Generator& g) { init::orthogonal_(x, 1, g); }},
  };
  for (const auto& [name, initialise] : initialisers) {
    SCOPED_TRACE(name);
    const auto run = [&, &initialise = initialise](Device device, bool in_scope) {
      std::optional<DeviceScope> scope;
      if (in_scope) scope.emplace(device);
      Generator numbers(7);
      const Tensor x = empty({3, 4}, DType::kF32, device);
      initialise(x, numbers);
      EXPECT_EQ(x.device(), device);
      return std::pair(device == kNull ? std::vector<float>() : x.to_vector<float>(), numbers.state().offset);
    };
    const auto expected = run(kCpu, false);
    for (const bool in_scope : {false, true}) {
      EXPECT_EQ(run(kSim, in_scope), expected) << in_scope;
      EXPECT_EQ(run(kNull, in_scope).second, expected.second) << in_scope;
    }
  }
}

}  // namespace
}  // namespace chorale::nn::oracle
