// ZeRO with parameters on devices, also on several. The simulated ones run the CPU's kernels, so that everything has
// the CPU's bits.
#include <gtest/gtest.h>

#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/nn/linear.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/zero/zero_optimizer.h"
#include "chorale/zero/zero_test_util.h"

namespace chorale::zero {
namespace {

constexpr Device kFirstSim{DeviceType::kSim, 0}, kSecondSim{DeviceType::kSim, 1};
using DeviceAdam = ZeroOptimizer<optim::Adam, optim::AdamOptions>;

// Ranks that are threads share a device's default stream; each has its own here.
void run_on_sim(int size, const std::function<void(comm::Group&)>& body) {
  eager::add_sim_device({});
  comm::run_ranks(size, [&](comm::Group& group) {
    const StreamScope first(make_stream(kFirstSim)), second(make_stream(kSecondSim));
    body(group);
  });
}

struct ThreeLayers : nn::Module {
  nn::Linear a{2, 3}, b{3, 3}, c{3, 3};
  CHORALE_MODULE(ThreeLayers, a, b, c)
  Tensor forward(const Tensor& x) { return c(relu(b(relu(a(x))))); }
};
template <class M>
M sampled(M model) {
  model.to(DType::kF64);
  const NoGrad quiet;
  int number = 0;
  for (const Tensor& p : model.parameters()) copy_(p, op::sample(p.sizes(), ++number));
  return model;
}

// spec: test_zero_join_gpu
TEST(ZeroOnDevices, RanksMayHaveDifferentNumbersOfInputs) {
  run_on_sim(3, [](comm::Group& group) {
    constexpr int kLeast = 3;  // rank r has kLeast + r inputs, twice
    const auto train = [&](Device device) {
      ThreeLayers model = sampled(ThreeLayers());
      model.to(device);
      parallel::DistributedDataParallel<ThreeLayers> ddp(std::move(model), group);
      DeviceAdam optimizer({{ddp.named_parameters(), {.lr = 0.01}}}, group);
      for (int epoch = 0; epoch < 2; ++epoch) {
        reducer::join({&ddp, &optimizer}, {}, [&] {
          for (int step = 0; step < kLeast + group.rank(); ++step) {
            optimizer.zero_grad();
            backward(mean(square(ddp(to(op::sample({20, 2}, 100 * step + group.rank()), device)))));
            optimizer.step();
          }
        });
      }
      std::vector<std::vector<double>> values;
      for (const auto& [name, p] : ddp.named_parameters()) values.push_back(p.template to_vector<double>());
      return values;
    };
    EXPECT_EQ(train(kFirstSim), train(kCpu));
  });
}

// The first layer on one device, the second on another.
struct OnTwoDevices : nn::Module {
  nn::Linear first{10, 6}, second{6, 5};
  CHORALE_MODULE(OnTwoDevices, first, second)
  Tensor forward(const Tensor& x) {
    const Tensor y = relu(first(chorale::to(x, first.weight.device())));
    return second(chorale::to(y, second.weight.device()));
  }
};

// spec: test_zero_model_parallel
TEST(ZeroOnDevices, AModelMayLieOnSeveralOfThem) {
  run_on_sim(2, [](comm::Group& group) {
    struct Seen {
      std::vector<double> losses;
      std::vector<std::vector<double>> values;
      bool operator==(const Seen&) const = default;
    };
    const auto train = [&](Device one, Device two, bool zero, bool views) {
      OnTwoDevices model = sampled(OnTwoDevices());
      model.first.to(one);
      model.second.to(two);
      parallel::DistributedDataParallel<OnTwoDevices> ddp(std::move(model), group);
      // Parameters of a device are a group.
      const NamedTensors all = ddp.named_parameters(), first(all.begin(), all.begin() + 2),
                         second(all.begin() + 2, all.end());
      std::optional<DeviceAdam> parts;
      std::optional<optim::Adam> whole;
      if (zero) {
        parts.emplace(std::vector<DeviceAdam::Group>{{first, {.lr = 0.01}}, {second, {.lr = 0.01}}}, group,
                      ZeroOptions{.bucket_views = views});
      } else {
        whole.emplace(std::vector<DeviceAdam::Group>{{first, {.lr = 0.01}}, {second, {.lr = 0.01}}});
      }
      Seen seen;
      for (int step = 0; step < 4; ++step) {
        zero ? parts->zero_grad() : whole->zero_grad();
        const Tensor loss = mean(square(ddp(op::sample({7, 10}, 100 * step + group.rank()))));
        backward(loss);
        zero ? parts->step() : whole->step();
        seen.losses.push_back(loss.item<double>());
      }
      for (const auto& [name, p] : ddp.named_parameters()) {
        EXPECT_EQ(p.device(), name.find("first") != std::string::npos ? one : two) << name;
        seen.values.push_back(p.template to_vector<double>());
      }
      return seen;
    };
    const Seen expected = train(kCpu, kCpu, false, false);
    EXPECT_EQ(train(kFirstSim, kSecondSim, false, false), expected) << "the plain optimizer";
    for (const bool views : {false, true})
      EXPECT_EQ(train(kFirstSim, kSecondSim, true, views), expected) << "views " << views;
  });
}

// What a rank has on each device counts, and is scaled there.
TEST(ZeroOnDevices, GradientsAreClippedWhereTheyAre) {
  run_on_sim(2, [](comm::Group& group) {
    const auto clipped = [&](Device one, Device two) {
      const Tensor a = set_requires_grad(to(op::sample({6}, 1), one)),
                   b = set_requires_grad(to(op::sample({5}, 2), two)),
                   c = set_requires_grad(to(op::sample({4}, 3), two)),
                   d = set_requires_grad(to(op::sample({3}, 4), one));
      DeviceAdam optimizer({{{{"a", a}, {"d", d}}, {.lr = 0.01}}, {{{"b", b}, {"c", c}}, {.lr = 0.01}}}, group);
      for (const Tensor& x : {a, b, c, d}) set_gradient(x, mul(detach(x), 3));
      const double norm = optimizer.clip_grad_norm(0.5);
      optimizer.step();
      std::vector<std::vector<double>> values{{norm}};
      for (const Tensor& x : {a, b, c, d}) values.push_back(gradient(x).to_vector<double>());
      for (const Tensor& x : {a, b, c, d}) values.push_back(x.to_vector<double>());
      return values;
    };
    const auto expected = clipped(kCpu, kCpu), found = clipped(kFirstSim, kSecondSim);
    for (size_t i = 0; i < expected.size(); ++i) {
      for (size_t k = 0; k < expected[i].size(); ++k) EXPECT_NEAR(found[i][k], expected[i][k], 1e-12) << i << " " << k;
    }
  });
}

}  // namespace
}  // namespace chorale::zero
