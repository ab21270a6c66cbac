// Tests of ZeRO under join(), on any device.
#pragma once

#include <functional>
#include <optional>

#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/optim/optim.h"
#include "chorale/reducer/join.h"
#include "chorale/zero/zero_optimizer.h"
#include "chorale/zero/zero_test_util.h"

namespace chorale::zero {

// Sets the gradients of each step, as averaging over all ranks would with zeros from those that have run out of inputs,
// and compares what the step before has made.
class GradientSetter final : public reducer::Joinable {
 public:
  GradientSetter(const comm::Group& group, NamedTensors parameters, std::vector<std::vector<Tensor>> gradients,
                 std::vector<std::vector<std::vector<double>>> expected)
      : group_(group),
        parameters_(std::move(parameters)),
        gradients_(std::move(gradients)),
        expected_(std::move(expected)) {}

  void set() {
    if (reducer::Join* join = current_join()) join->notify(*this);
    next();
  }
  const comm::Group& join_group() const override { return group_; }
  void shadow_step(reducer::Join&) override { next(); }
  void after_join(int) override { compare(); }
  size_t steps() const { return step_; }

 private:
  void next() {
    compare();
    for (size_t i = 0; i < parameters_.size(); ++i) set_gradient(parameters_[i].second, gradients_.at(step_)[i]);
    ++step_;
  }
  void compare() const {
    for (size_t i = 0; i < parameters_.size(); ++i)
      EXPECT_EQ(parameters_[i].second.to_vector<double>(), expected_.at(step_)[i]) << "before step " << step_;
  }

  const comm::Group& group_;
  NamedTensors parameters_;
  std::vector<std::vector<Tensor>> gradients_;              // by step
  std::vector<std::vector<std::vector<double>>> expected_;  // values before each step, and at the end
  size_t step_ = 0;
};

// Ranks with different numbers of inputs: each step of the sharded optimizer, also those of ranks that have run out,
// makes what one that has all states makes of the same gradients.
inline void expect_join_of_uneven_inputs(Device device) {
  constexpr int kRanks = 3, kLeast = 3;  // rank r has kLeast + r inputs
  comm::run_ranks(kRanks, [device](comm::Group& group) {
    std::optional<StreamScope> own;
    if (device != kCpu) own.emplace(make_stream(device));  // ranks that are threads would share the default one
    const std::vector<int64_t> sizes{6, 3, 9, 3, 9, 3};
    const NamedTensors mine = parameters_of(sizes, device), plain = parameters_of(sizes, device);
    optim::Adam reference(plain, {.lr = 0.01});
    std::vector<std::vector<Tensor>> gradients;
    std::vector<std::vector<std::vector<double>>> expected;
    const auto note = [&] {
      expected.emplace_back();
      for (const auto& [name, x] : plain) expected.back().push_back(x.to_vector<double>());
    };
    note();
    for (int step = 0; step < kLeast + kRanks - 1; ++step) {
      gradients.emplace_back();
      for (size_t i = 0; i < plain.size(); ++i) {
        Tensor sum = zeros(plain[i].second.sizes(), DType::kF64);
        for (int r = 0; r < kRanks; ++r) {
          if (step < kLeast + r) sum = sum + op::sample(sum.sizes(), 100 * step + 10 * r + static_cast<int>(i));
        }
        gradients.back().push_back(to(sum / kRanks, device));
        set_gradient(plain[i].second, gradients.back().back());
      }
      reference.step();
      note();
    }
    ZeroOptimizer<optim::Adam, optim::AdamOptions> optimizer({{mine, {.lr = 0.01}}}, group);
    GradientSetter setter(group, mine, gradients, expected);
    reducer::join({&setter, &optimizer}, {}, [&] {
      for (int step = 0; step < kLeast + group.rank(); ++step) {
        setter.set();
        optimizer.step();
      }
    });
    EXPECT_EQ(setter.steps(), gradients.size());
  });
}

}  // namespace chorale::zero
