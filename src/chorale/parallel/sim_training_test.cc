// Training on the simulated device gives the bits of the CPU: modules that move, optimizers, and DDP, whose groups
// reach the device through copies of the host.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "chorale/base/comm_error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/sim_collectives_test_util.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/device/stream.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/models/bert.h"
#include "chorale/models/gpt2.h"
#include "chorale/models/mlp.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/tensor_parallel.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

constexpr Device kSim{DeviceType::kSim, 0};
constexpr int kSteps = 4;

class SimTraining : public testing::Test {
 protected:
  void SetUp() override {
    eager::add_sim_device({.most_delay = std::chrono::microseconds(20)});
    threads_ = thread_count();
    set_thread_count(1);
  }
  void TearDown() override { set_thread_count(threads_); }

 private:
  int threads_ = 1;
};

struct Trained {
  std::vector<double> losses;
  std::vector<std::vector<double>> parameters;
};

using Make = std::function<std::unique_ptr<optim::Optimizer>(const nn::Module&)>;

Trained train_on(Device device, const Make& make, DType dtype = DType::kF32) {
  manual_seed(3);
  nn::Sequential model = models::mlp({12, 16, 4});
  model.to(device);
  model.to(dtype);
  auto optimizer = make(model);
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    const Tensor x = to(to(op::sample({6, 12}, 10 + step, -1, 1), dtype), device);
    const Tensor target = to(Tensor::from(std::vector<int64_t>{0, 1, 2, 3, 1, step % 4}, {6}), device);
    optimizer->zero_grad();
    const Tensor y = model(x);
    const Tensor loss = cross_entropy(y, target);
    backward(loss);
    optimizer->step();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& [name, parameter] : model.named_parameters()) {
    EXPECT_EQ(parameter.device(), device) << name;
    result.parameters.push_back(parameter.to_vector<double>());
  }
  return result;
}

template <class Optimizer, class Options>
void expect_bits_of_cpu(const Options& options) {
  const Make make = [&](const nn::Module& module) {
    return std::make_unique<Optimizer>(module.named_parameters(), options);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {  // the latter with masters
    const Trained expected = train_on(kCpu, make, dtype), found = train_on(kSim, make, dtype);
    EXPECT_EQ(found.losses, expected.losses) << dtype;
    EXPECT_EQ(found.parameters, expected.parameters) << dtype;
    EXPECT_NE(found.losses.front(), found.losses.back()) << dtype;
  }
}

TEST_F(SimTraining, OptimizersGiveTheBitsOfTheCpu) {
  expect_bits_of_cpu<optim::Sgd>(optim::SgdOptions{.lr = 0.1, .momentum = 0.9});
  expect_bits_of_cpu<optim::Adam>(optim::AdamOptions{.lr = 0.01, .amsgrad = true});
  expect_bits_of_cpu<optim::AdamW>(optim::AdamWOptions{.lr = 0.01});
  expect_bits_of_cpu<optim::Adagrad>(optim::AdagradOptions{.lr = 0.1, .initial_accumulator = 0.1});
  expect_bits_of_cpu<optim::Rmsprop>(optim::RmspropOptions{.lr = 0.01, .momentum = 0.9, .centered = true});
  expect_bits_of_cpu<optim::Lamb>(optim::LambOptions{.lr = 0.1});
  expect_bits_of_cpu<optim::Adadelta>(optim::AdadeltaOptions{.lr = 1});
  expect_bits_of_cpu<optim::Adamax>(optim::AdamaxOptions{.lr = 0.1});
  expect_bits_of_cpu<optim::Nadam>(optim::NadamOptions{.lr = 0.1});
  expect_bits_of_cpu<optim::Radam>(optim::RadamOptions{.lr = 0.1});
  expect_bits_of_cpu<optim::Asgd>(optim::AsgdOptions{.lr = 0.1});
  expect_bits_of_cpu<optim::Rprop>(optim::RpropOptions{.lr = 0.1});
}

// Scaled losses under autocast; in one step the scale is too large, and the step is left out.
TEST_F(SimTraining, MixedPrecisionGivesTheBitsOfTheCpu) {
  const auto trained = [](Device device) {
    manual_seed(3);
    nn::Sequential model = models::mlp({12, 16, 4});
    model.to(device);
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.05});
    optim::GradScaler scaler({.scale = 0x1p+24, .backoff = 0x1p-12, .interval = 2});
    std::vector<double> values;
    for (int step = 0; step < 5; ++step) {
      const Tensor x = to(to(op::sample({6, 12}, 10 + step, -1, 1), DType::kF32), device);
      const Tensor target = to(Tensor::from(std::vector<int64_t>{0, 1, 2, 3, 1, step % 4}, {6}), device);
      optimizer.zero_grad();
      Tensor loss;
      {
        const Autocast lower(DType::kF16);
        loss = cross_entropy(model(x), target);
      }
      backward(scaler.scale(loss));
      scaler.unscale(optimizer);
      values.push_back(static_cast<double>(optim::clip_grad_norm(model.parameters(), 0.5)));
      scaler.step(optimizer);
      scaler.update();
      values.push_back(loss.item<double>());
      values.push_back(scaler.state_dict()[0].second.item<double>());
    }
    return values;
  };
  const std::vector<double> expected = trained(kCpu);
  EXPECT_FALSE(std::isfinite(expected[0]));
  EXPECT_TRUE(std::isfinite(expected[3]));
  const std::vector<double> found = trained(kSim);
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(double)), 0);
}

TEST_F(SimTraining, TextModelsWorkWhereTheyAre) {
  manual_seed(5);
  models::Gpt2 gpt({.vocab_size = 31, .n_positions = 16, .n_embd = 12, .n_layer = 2, .n_head = 3});
  models::BertForMaskedLM bert({.vocab_size = 31,
                                .hidden_size = 12,
                                .num_hidden_layers = 1,
                                .num_attention_heads = 3,
                                .intermediate_size = 16,
                                .max_position_embeddings = 16});
  gpt.eval();
  bert.eval();
  const Tensor ids = Tensor::from(std::vector<int64_t>{3, 1, 4, 1, 5, 9, 2, 6}, {2, 4});
  const auto written = [&](Device device) {
    Generator numbers(8);
    const models::GenerateOptions options{
        .max_new_tokens = 6, .eos_token = 30, .sampling = {.temperature = 0.9, .top_k = 9, .generator = &numbers}};
    return gpt.generate(to(ids, device), options).to_vector<int64_t>();
  };
  const auto guessed = [&](Device device) {
    const NoGrad quiet;
    return bert(models::BertInput{to(ids, device)}).to_vector<float>();
  };
  const auto expected_text = written(kCpu);
  const auto expected_guesses = guessed(kCpu);
  gpt.to(kSim);
  bert.to(kSim);
  EXPECT_EQ(written(kSim), expected_text);
  EXPECT_EQ(guessed(kSim), expected_guesses);
}

TEST_F(SimTraining, AModuleComesBackFromTheNullDeviceByBeingFilled) {
  nn::Sequential model = models::mlp({3, 2});
  const auto before = model.state_dict();
  nn::Sequential other = models::mlp({3, 2});
  other.to(kNull);
  EXPECT_THROW(other.to(kSim), InvalidArgument);
  other.materialize(kSim);
  other.load_state_dict(before);
  for (const auto& [name, parameter] : other.named_parameters()) EXPECT_EQ(parameter.device(), kSim) << name;
  other.to(kCpu);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(other.state_dict()[i].second.to_vector<float>(), before[i].second.to_vector<float>());
  }
}

TEST_F(SimTraining, CollectivesReachTheDevice) {
  run_ranks(3, [](comm::Group& group) {
    const auto mine = static_cast<float>(group.rank());
    const Tensor x = to(Tensor::from({mine, 10 * mine, 100 * mine, 7.0f}, {2, 2}), kSim);
    const Tensor turned = transpose(x, 0, 1);
    group.all_reduce(turned).wait();
    EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{3, 30, 300, 21}));
    const Tensor all = zeros({3}, DType::kF32, kSim);
    group.all_gather_into(all, full({1}, mine + 1, DType::kF32, kSim)).wait();
    EXPECT_EQ(all.to_vector<float>(), (std::vector<float>{1, 2, 3}));
  });
}

// Three steps of DDP from equal parameters: the losses and the parameters of this rank.
Trained train_replicas(comm::Group& group, Device device, const DdpOptions& options,
                       const std::optional<CommHook>& hook = {}) {
  nn::Sequential model = models::mlp({12, 16, 4});
  {
    const NoGrad quiet;
    int number = 0;
    for (const auto& [name, parameter] : model.named_parameters())
      copy_(parameter, to(op::sample(parameter.sizes(), ++number, -0.3, 0.3), DType::kF32));
  }
  model.to(device);
  DistributedDataParallel ddp(std::move(model), group, options);
  if (hook) ddp.register_comm_hook(*hook);
  optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1, .momentum = 0.9});
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    const Tensor x = to(to(op::sample({6, 12}, 10 * group.rank() + step, -1, 1), DType::kF32), device);
    const Tensor target = to(Tensor::from(std::vector<int64_t>{0, 1, 2, 3, group.rank() % 4, step % 4}, {6}), device);
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(ddp(x), target);
    backward(loss);
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& [name, parameter] : ddp.named_parameters()) {
    EXPECT_EQ(parameter.device(), device) << name;
    EXPECT_EQ(gradient(parameter).device(), device) << name;
    result.parameters.push_back(parameter.to_vector<double>());
  }
  return result;
}

TEST_F(SimTraining, ReplicasGiveTheBitsOfTheCpu) {
  for (const bool views : {true, false}) {
    for (const size_t cap : {size_t{25}, size_t{0}}) {  // 0: a bucket for each parameter
      run_ranks(3, [&](comm::Group& group) {
        const StreamScope own(make_stream(kSim));
        DdpOptions options{.gradient_as_bucket_view = views};
        if (cap == 0) options.bucket_cap_mb = 1e-5;
        const Trained expected = train_replicas(group, kCpu, options), found = train_replicas(group, kSim, options);
        EXPECT_EQ(found.losses, expected.losses) << views << " " << cap;
        EXPECT_EQ(found.parameters, expected.parameters) << views << " " << cap;
        EXPECT_NE(found.losses.front(), found.losses.back());
      });
    }
  }
}

TEST_F(SimTraining, GradientsAreReducedInALowerTypeThanTheirOwn) {
  run_ranks(2, [&](comm::Group& group) {
    const DdpOptions options{.mixed_precision = MixedPrecision{.reduce = DType::kF64}};
    EXPECT_EQ(train_replicas(group, kSim, options).parameters, train_replicas(group, kCpu, options).parameters);
  });
}

TEST_F(SimTraining, CommunicationHooksWorkWhereTheGradientsAre) {
  const auto power_sgd = [] {
    return std::make_shared<PowerSgd>(PowerSgdOptions{.start_iteration = 2, .min_compression_rate = 1});
  };
  const std::pair<const char*, std::function<CommHook()>> hooks[] = {
      {"bf16", [] { return bf16_compress_hook(); }},
      {"f16", [] { return fp16_compress_wrapper(allreduce_hook()); }},
      {"quantized", [] { return quantize_per_tensor_hook(); }},
      {"quantized chunks", [] { return quantize_per_channel_hook(nullptr, 50); }},
      {"PowerSGD", [&] { return power_sgd_hook(power_sgd()); }},
      {"batched PowerSGD", [&] { return batched_power_sgd_hook(power_sgd()); }},
  };
  for (const auto& [name, make] : hooks) {
    run_ranks(2, [&, &name = name, &make = make](comm::Group& group) {
      const StreamScope own(make_stream(kSim));
      const Trained expected = train_replicas(group, kCpu, {}, make()), found = train_replicas(group, kSim, {}, make());
      EXPECT_EQ(found.losses, expected.losses) << name;
      EXPECT_EQ(found.parameters, expected.parameters) << name;
    });
  }
}

TEST_F(SimTraining, SyncBatchNormGivesTheBitsOfTheCpu) {
  run_ranks(2, [](comm::Group& group) {
    const StreamScope own(make_stream(kSim));
    for (const int64_t batch : {int64_t{4}, int64_t{3} * group.rank()}) {  // a rank may have none
      const auto trained = [&](Device device) {
        nn::BatchNorm2d norm(3);
        norm.to(device);
        convert_sync_batchnorm(norm, group);
        const auto numbers = [&](int seed) {
          return to(to(op::sample({batch, 3, 2, 5}, seed + group.rank()), DType::kF32), device);
        };
        const Tensor x = set_requires_grad(numbers(1));
        const Tensor y = norm(x);
        backward(y, numbers(5));
        std::vector<std::vector<float>> values;
        for (const Tensor& found : {y, gradient(x), gradient(norm.weight), gradient(norm.bias),
                                    detach(norm.running_mean), detach(norm.running_var)}) {
          EXPECT_EQ(found.device(), device);
          values.push_back(found.to_vector<float>());
        }
        return values;
      };
      EXPECT_EQ(trained(kSim), trained(kCpu)) << batch;
    }
  });
}

TEST_F(SimTraining, LossOfSplitClassesGivesTheBitsOfTheCpu) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh here(group, {2}), there = here.on("sim");
    const StreamScope own(make_stream(there.device()));
    const Tensor target = Tensor::from<int64_t>({0, 4, -100, 2}, {4}), weights = op::sample({5}, 5, 0.5, 1.5);
    const auto trained = [&](const Mesh& mesh, int64_t classes) {
      const Tensor logits = to(op::sample({4, classes}, 3), mesh.device());
      const Tensor x = set_requires_grad(distribute(logits, mesh, {shard(1)}));
      const Tensor known = minimum(to(target, mesh.device()), classes - 1);
      const Tensor loss = loss_parallel(x, known, {.weight = to(narrow(weights, 0, 0, classes), mesh.device())});
      backward(loss);
      EXPECT_EQ(to_local(loss).device(), mesh.device());
      return std::pair(to_local(loss).item<double>(), to_local(gradient(x)).to_vector<double>());
    };
    for (const int64_t classes : {5, 1}) EXPECT_EQ(trained(there, classes), trained(here, classes)) << classes;
  });
}

TEST_F(SimTraining, ShardedTensorsAreMadeOnTheDeviceOfTheirMesh) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh here(group, {2}), there = here.on("sim");
    const StreamScope own(make_stream(there.device()));
    const auto made = [&](const Mesh& mesh) {
      Generator g(4);
      std::vector<std::vector<float>> values;
      for (const Tensor& x :
           {full({3, 2}, 7, mesh, {shard(0)}), zeros({3, 2}, mesh, {shard(1)}), ones({3, 2}, mesh, {replicate()}),
            uniform({5, 3}, mesh, {shard(0)}, 0, 1, DType::kF32, g),
            normal({5, 3}, mesh, {shard(1)}, 0, 1, DType::kF32, g)}) {
        EXPECT_EQ(to_local(x).device(), mesh.device());
        values.push_back(full_tensor(x).to_vector<float>());
      }
      return values;
    };
    EXPECT_EQ(made(there), made(here));
  });
}

// Rank 0 comes to the call only when rank 1's host has gone on behind its wait: were the host to wait there, neither
// would ever go on.
TEST_F(SimTraining, AStreamWaitsForACollectiveWhileTheHostGoesOn) {
  run_ranks(2, [](comm::Group& group) {
    const StreamScope own(make_stream(kSim));  // these ranks are threads, which share the default one
    const Tensor x = full({1000}, group.rank() + 1.0, DType::kF32, kSim);
    if (group.rank() == 0) group.recv(Tensor::empty({1}, DType::kF32), 1);
    const comm::Work work = group.all_reduce(x);
    Stream stream = current_stream(kSim);
    work.wait(stream);
    if (group.rank() == 1) group.send(ones({1}), 0);
    const Tensor doubled = mul(x, 2.0);
    EXPECT_EQ(doubled.to_vector<float>(), std::vector<float>(1000, 6.0f));
  });
}

TEST_F(SimTraining, AFailedCollectiveIsAnErrorOfTheStreamThatWaitsForIt) {
  run_ranks(2, [](comm::Group& group) {
    comm::Group other = group.duplicate();
    if (group.rank() == 0) {
      const StreamScope own(make_stream(kSim));
      const Tensor x = ones({4}, DType::kF32, kSim);
      Stream stream = current_stream(kSim);
      other.all_reduce(x, Reduce::kSum, {.timeout = std::chrono::milliseconds(200)}).wait(stream);
      EXPECT_THROW(synchronize(stream), CommError);
    }
    group.barrier().wait();
  });
}

class SharedSimDevice : public SimTraining {
 protected:
  void SetUp() override {
    SimTraining::SetUp();
    set_peer_memory(DeviceType::kSim, &peers_);
  }
  void TearDown() override {
    set_peer_memory(DeviceType::kSim, nullptr);
    SimTraining::TearDown();
  }
  comm::SimPeers peers_;
};

// Numbers whose sum depends on the order, and on place and rank.
Tensor uneven_numbers(int64_t n, int rank, DType dtype) {
  return to(op::sample({n}, 7 * rank + 1, -1, 1) * std::pow(10.0, rank), dtype);
}

TEST_F(SharedSimDevice, SumsHaveTheBitsOfTheHosts) {
  for (const int size : {2, 3, 5}) {
    peers_.sums = 0;
    run_ranks(size, [&](comm::Group& group) {
      const StreamScope own(make_stream(kSim));
      group.all_reduce(ones({1}, DType::kF32, kSim)).wait();  // asks which device the others have
      for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
        for (const comm::Reduction how :
             {comm::Reduction(Reduce::kSum), comm::Reduction(Reduce::kAverage), comm::premultiplied_sum(0.3)}) {
          // Several are in flight, of one size and of others; one lies across.
          std::vector<Tensor> here, there;
          std::vector<comm::Work> works;
          works.reserve(5);
          for (const int64_t n : {int64_t{1}, int64_t{30000}, int64_t{30000}, int64_t{77}}) {
            here.push_back(uneven_numbers(n, group.rank(), dtype));
            there.push_back(to(here.back(), kSim));
          }
          const Tensor turned = transpose(to(reshape(uneven_numbers(12, group.rank(), dtype), {3, 4}), kSim), 0, 1);
          there.push_back(turned);
          here.push_back(contiguous(to(turned, kCpu)));
          for (const Tensor& x : there) works.push_back(group.all_reduce(x, how));
          for (const comm::Work& work : works) work.wait();
          for (size_t i = 0; i < here.size(); ++i) {
            group.all_reduce(here[i], how).wait();
            EXPECT_EQ(there[i].to_vector<double>(), here[i].to_vector<double>()) << dtype << ' ' << i;
          }
        }
      }
    });
    EXPECT_EQ(peers_.sums, size * 4 * 3 * 5);
  }
}

TEST_F(SharedSimDevice, ReplicasGiveTheBitsOfTheCpu) {
  run_ranks(3, [&](comm::Group& group) {
    const StreamScope own(make_stream(kSim));
    DdpOptions options;
    options.bucket_cap_mb = 1e-5;
    const Trained expected = train_replicas(group, kCpu, options), found = train_replicas(group, kSim, options);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.parameters, expected.parameters);
  });
  EXPECT_GT(peers_.sums, 3 * kSteps);
  EXPECT_LE(peers_.made, 3 * 2 * 4);  // memory is used again: two pieces for each of four parameters
}

TEST_F(SharedSimDevice, RanksOnDifferentDevicesGoThroughTheHost) {
  run_ranks(2, [&](comm::Group& group) {
    const Device device{DeviceType::kSim, static_cast<int16_t>(group.rank())};
    const StreamScope own(make_stream(device));
    const Tensor x = full({5}, group.rank() + 1.0, DType::kF32, device);
    for (int i = 0; i < 3; ++i) group.all_reduce(x, Reduce::kAverage).wait();
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(5, 1.5f));
  });
  EXPECT_EQ(peers_.sums, 0);
}

TEST_F(SharedSimDevice, ARankThatStaysAwayIsNamed) {
  run_ranks(2, [&](comm::Group& group) {
    const StreamScope own(make_stream(kSim));
    comm::Group other = group.duplicate();
    const Tensor x = ones({40000}, DType::kF32, kSim);
    for (int i = 0; i < 2; ++i) other.all_reduce(x).wait();
    if (group.rank() == 0) {
      try {
        other.all_reduce(x, Reduce::kSum, {.timeout = std::chrono::milliseconds(200)}).wait();
        ADD_FAILURE() << "a sum without rank 1";
      } catch (const CommError& error) {
        EXPECT_NE(std::string(error.what()).find("all_reduce"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
      }
      EXPECT_EQ(x.to_vector<float>(), std::vector<float>(40000, 4.0f));  // as it was
    }
    group.barrier().wait();
  });
}

}  // namespace
}  // namespace chorale::parallel
