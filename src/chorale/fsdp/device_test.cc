// Fully sharded training on a device: streams that run late, memory that the host cannot touch. The simulated device
// runs the CPU's kernels, so that everything has the CPU's bits.
#include "chorale/eager/sim_kernels.h"
#include "chorale/fsdp/fsdp_test_util.h"

namespace chorale::fsdp {
namespace {

constexpr Device kSimDevice{DeviceType::kSim, 0};

// Ranks that are threads share a device's default stream; each has its own here.
void run_on_streams(int size, const std::function<void(comm::Group&)>& body) {
  eager::add_sim_device({});
  run_ranks(size, [&](comm::Group& group) {
    const StreamScope own(make_stream(kSimDevice));
    body(group);
  });
}

// ---- collectives of sharded tensors there

TEST(FullyShardedOnADevice, ShardedTensorsAreMovedBetweenPlacements) {
  run_on_streams(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"a", "b"});
    const NoGrad quiet;
    const std::vector<Placements> all{{replicate(), replicate()},
                                      {shard(0), replicate()},
                                      {shard(0), shard(1)},
                                      {shard(1), shard(0)},
                                      {shard(0), shard(0)}};
    const Tensor whole = pattern({8, 5}, 3);
    for (const Placements& from : all) {
      for (const Placements& into : all) {
        const Tensor x = distribute(whole, mesh, from), there = distribute(to(whole, kSimDevice), mesh, from);
        EXPECT_EQ(to_local(there).device(), kSimDevice);
        const std::string what = concat(from, " to ", into);
        expect_close(to_local(redistribute(there, into)), to_local(redistribute(x, into)), 0, what);
        expect_close(full_tensor(sum(redistribute(there, into), {0})), full_tensor(sum(x, {0})), 1e-6, what);
      }
    }
    const Tensor strided = distribute(to(whole, kSimDevice), mesh, {strided_shard(0, 2), shard(0)});
    expect_close(full_tensor(strided), whole, 0, "strided");
  });
}

}  // namespace
}  // namespace chorale::fsdp
