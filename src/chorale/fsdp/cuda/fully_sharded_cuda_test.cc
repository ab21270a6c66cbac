// Fully sharded training among ranks that share a GPU: parts, whole parameters and gradients are there.
#include <gtest/gtest.h>

#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/fsdp/fsdp_test_util.h"

namespace chorale::fsdp {
namespace {

using cuda::kGpu;

class CudaFullySharded : public cuda::GpuNumbersTest {};

// spec: test_train_parity_multi_group
TEST_F(CudaFullySharded, LateRanksChangeNothing) { expect_parity_of_late_ranks(kGpu, LateRanks::kPlain, 1e-4); }

// Two ranks beside the same on the CPU, with parts on the GPU, and with parts on the host while it computes: losses,
// and norms of gradients, for which sharded tensors communicate.
TEST_F(CudaFullySharded, TrainsAsOnTheCpu) {
  const auto losses = [](comm::Group& group, Device computes, Device keeps) {
    MlpStack model = seeded(MlpStack(2, 16));
    model.to(keeps);
    shard_layers_and_root(model, model.layers, {.mesh = line(group), .offload = computes != keeps, .device = computes});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
    std::vector<double> found;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const Tensor loss = mean(square(model(to(pattern({3, 16}, 10 * step + group.rank()), computes))));
      backward(loss);
      found.push_back(optim::clip_grad_norm(optimizer.parameters(), 0.1));
      optimizer.step();
      found.push_back(loss.item<double>());
    }
    return found;
  };
  run_ranks(2, [&](comm::Group& group) {
    const StreamScope own(make_stream(kGpu));
    const auto expected = losses(group, kCpu, kCpu);
    EXPECT_NE(expected.front(), expected.back());
    for (const Device keeps : {kGpu, kCpu}) {
      const auto found = losses(group, kGpu, keeps);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-5) << keeps << ' ' << i;
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
