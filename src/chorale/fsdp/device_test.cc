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

struct TrainedParts {
  std::vector<double> losses;
  std::vector<std::vector<double>> parts;
};
bool operator==(const TrainedParts& a, const TrainedParts& b) { return a.losses == b.losses && a.parts == b.parts; }
TrainedParts parts_of(const nn::Module& model, std::vector<double> losses) {
  TrainedParts trained{std::move(losses), {}};
  for (const auto& [name, p] : model.named_parameters())
    trained.parts.push_back(to_local(detach(p)).to_vector<double>());
  return trained;
}

// spec: test_root_move_forward_input_to_device
TEST(FullyShardedOnADevice, TheOutermostModuleTakesInputsOfTheHostThere) {
  run_on_streams(2, [](comm::Group& group) {
    const auto train = [&](Device computes, bool offload) {
      MlpStack model = seeded(MlpStack(2, 6));
      if (!offload) model.to(computes);
      shard_layers_and_root(model, model.layers,
                            {.mesh = line(group), .offload = offload, .device = offload ? computes : kCpu});
      optim::Sgd optimizer(model.named_parameters(), {.lr = 0.1});
      std::vector<double> losses;
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Tensor x = set_requires_grad(pattern({3, 6}, step + 4 * group.rank()));
        const Tensor y = model(x);
        EXPECT_EQ(y.device(), computes);
        const Tensor loss = sum(square(y));
        backward(loss);
        EXPECT_EQ(gradient(x).device(), kCpu) << "its gradient comes back";
        losses.push_back(loss.item<double>());
        losses.push_back(sum(gradient(x)).item<double>());
        optimizer.step();
      }
      return parts_of(model, std::move(losses));
    };
    const TrainedParts expected = train(kCpu, false);
    EXPECT_EQ(train(kSimDevice, false), expected);
    EXPECT_EQ(train(kSimDevice, true), expected);
  });
}

// spec: test_post_optim_event
TEST(FullyShardedOnADevice, AForwardBeginsBehindTheUpdateOnAnotherStream) {
  run_on_streams(2, [](comm::Group& group) {
    const auto train = [&](Device computes) {
      MlpStack model = seeded(MlpStack(2, 6));
      model.to(computes);
      shard_layers_and_root(model, model.layers, {.mesh = line(group)});
      optim::AdamW optimizer(model.named_parameters(), {.lr = 0.05});
      const Stream updates = computes == kCpu ? current_stream(kCpu) : make_stream(computes);
      std::vector<double> losses;
      for (int step = 0; step < 10; ++step) {
        const Tensor loss = sum(square(model(pattern({3, 6}, step + 20 * group.rank()))));
        losses.push_back(loss.item<double>());
        optimizer.zero_grad();  // behind the forward, which is behind the update that reads them
        backward(loss);
        chorale::Event(current_stream(computes)).wait(updates);
        {
          const StreamScope there(updates);
          optimizer.step();
        }
        set_post_optimizer_event(model, chorale::Event(updates));
      }
      synchronize(updates);
      return parts_of(model, std::move(losses));
    };
    EXPECT_EQ(train(kSimDevice), train(kCpu));
    MlpStack model = seeded(MlpStack(1, 6));
    fully_shard(model, {.mesh = line(group)});
    EXPECT_THROW(set_post_optimizer_event(model, {}), StateError) << "before the first forward";
  });
}

// The buffers of both reductions are let go while streams still read them.
// spec: test_ar_buffer_lifetime_mixed_dtype
TEST(FullyShardedOnADevice, GradientsOfReplicasInTwoPrecisionsOutliveTheirReductions) {
  run_on_streams(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"replicate", "shard"});
    const auto train = [&](Device computes) {
      MlpStack model = seeded(MlpStack(3, 8));
      model.to(computes);
      // One group computes in bf16 and reduces in f32, the others in f32: their buffers have different sizes.
      fully_shard(model.layers[1],
                  {.mesh = mesh,
                   .mixed_precision = {.parameters = DType::kBF16, .reduce = DType::kF32, .outputs = DType::kF32}});
      fully_shard(model.layers[0], {.mesh = mesh});
      fully_shard(model.layers[2], {.mesh = mesh, .mixed_precision = {.reduce = DType::kBF16}});
      fully_shard(model, {.mesh = mesh});
      optim::Sgd optimizer(model.named_parameters(), {.lr = 0.05});
      std::vector<double> losses;
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        const Tensor loss = sum(square(model(pattern({3, 8}, step + 20 * group.rank()))));
        backward(loss);
        losses.push_back(loss.item<double>());
        optimizer.step();
      }
      return parts_of(model, std::move(losses));
    };
    const TrainedParts expected = train(kCpu);
    EXPECT_NE(expected.losses.front(), expected.losses.back());
    EXPECT_EQ(train(kSimDevice), expected);
  });
}

// ---- collectives of sharded tensors there

TEST(FullyShardedOnADevice, ShardedTensorsAreMovedBetweenPlacements) {
  run_on_streams(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"a", "b"});
    const NoGrad quiet;
    const std::vector<Placements> all{{replicate(), replicate()}, {shard(0), replicate()},
                                      {shard(0), shard(1)},       {shard(1), shard(0)},
                                      {shard(0), shard(0)},       {strided_shard(0, 2), shard(0)}};
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
  });
}

}  // namespace
}  // namespace chorale::fsdp
