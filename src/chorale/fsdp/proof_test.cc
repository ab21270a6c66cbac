// The proof: fully sharded training, ZeRO and data-parallel training give the same bits, and what one rank gives on the
// whole batch; random models under random policies; and ranks that die. A long run does all of it (CHORALE_SOAK).
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>

#include "chorale/base/parallel_for.h"
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/formula_test_util.h"
#include "chorale/models/gpt2.h"
#include "chorale/models/mlp.h"
#include "chorale/op/samples.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/zero/zero_optimizer.h"

namespace chorale::fsdp {
namespace {

// ---- the same as data-parallel training, ZeRO and one rank

constexpr int kProofSteps = 20;

struct ProofBatch {
  Tensor x, target;
};
using ProofBatches = std::function<ProofBatch(int step)>;

ProofBatches features(const Shape& sizes, DType dtype) {
  return [=](int step) {
    std::vector<int64_t> classes(static_cast<size_t>(sizes[0]));
    for (size_t i = 0; i < classes.size(); ++i)
      classes[i] = static_cast<int64_t>(i * 7 + static_cast<size_t>(step)) % 10;
    return ProofBatch{to(op::sample(sizes, 1000 + step, -1, 1), dtype), Tensor::from(classes, {sizes[0]})};
  };
}
ProofBatches tokens(int64_t rows, int64_t length, int64_t vocabulary) {
  return [=](int step) {
    std::vector<int64_t> values(static_cast<size_t>(rows * length));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<int64_t>(i * i * 31 + i * 7 + static_cast<size_t>(step) * 101) % vocabulary;
    const Tensor x = Tensor::from(values, {rows, length});
    return ProofBatch{x, x};
  };
}

template <class M>
M made(M model, DType dtype) {
  model.to(dtype);
  models::fill_by_formula(model);
  return model;
}

template <class Forward>
Tensor loss_of(Forward& forward, const ProofBatch& batch) {
  const Tensor y = forward(batch.x);
  return cross_entropy(y.dims() > 2 ? flatten(y, 0, -2) : y, flatten(batch.target));
}

// A group for every block, or every layer with weights where there are no blocks.
void shard_blocks(nn::Module& model, const Mesh& mesh) {
  for (const auto& [name, module] : model.named_modules()) {
    const bool is_layer = dynamic_cast<nn::Sequential*>(&model) &&
                          (dynamic_cast<nn::Linear*>(module) || dynamic_cast<nn::Conv2d*>(module));
    if (is_layer || dynamic_cast<models::EncoderBlock*>(module) || dynamic_cast<models::Gpt2Block*>(module))
      fully_shard(*module, {.mesh = mesh});
  }
  fully_shard(model, {.mesh = mesh});
}

constexpr double kRate = 0.01;

template <class M>
void expect_one_training(const M& start, const std::vector<int>& sizes, const ProofBatches& batches) {
  set_thread_count(1);
  const bool wide = start.parameters()[0].dtype() == DType::kF64;
  const double tolerance = wide ? 1e-9 : 1e-4;
  M alone = clone(start);
  std::vector<double> losses;
  {
    optim::Sgd optimizer(alone.named_parameters(), {.lr = kRate});
    for (int step = 0; step < kProofSteps; ++step) {
      optimizer.zero_grad();
      const Tensor loss = loss_of(alone, batches(step));
      backward(loss);
      optimizer.step();
      losses.push_back(loss.template item<double>());
    }
  }
  for (const int size : sizes) {
    run_ranks(size, [&](comm::Group& group) {
      set_thread_count(1);
      const Mesh mesh = line(group);
      std::vector<M> copies;
      for (int i = 0; i < 4; ++i) {
        copies.push_back(clone(start));
        parallel::convert_sync_batchnorm(copies.back(), group);
      }
      DistributedDataParallel<M> ddp(std::move(copies[0]), group), of_zero(std::move(copies[1]), group);
      M sharded = std::move(copies[2]);
      shard_blocks(sharded, mesh);
      // Four ranks are also two replicas of two shards each, whose sums are in another order.
      const bool has_replicas = size == 4;
      M replicated = std::move(copies[3]);
      if (has_replicas) shard_blocks(replicated, Mesh(group, {2, 2}, {"replicate", "shard"}));
      optim::Sgd one(ddp.named_parameters(), {.lr = kRate}), two(sharded.named_parameters(), {.lr = kRate});
      optim::Sgd four(replicated.named_parameters(), {.lr = kRate});
      zero::ZeroOptimizer<optim::Sgd, optim::SgdOptions> three({{of_zero.named_parameters(), {.lr = kRate}}}, group);
      for (int step = 0; step < kProofSteps; ++step) {
        const ProofBatch whole = batches(step);
        const int64_t rows = whole.x.size(0) / group.size(), first = rows * group.rank();
        const ProofBatch mine{narrow(whole.x, 0, first, rows), narrow(whole.target, 0, first, rows)};
        one.zero_grad();
        two.zero_grad();
        three.zero_grad();
        const Tensor loss = loss_of(ddp, mine);
        backward(loss);
        const Tensor of_shards = loss_of(sharded, mine);
        backward(of_shards);
        const Tensor of_parts = loss_of(of_zero, mine);
        backward(of_parts);
        one.step();
        two.step();
        three.step();
        if (has_replicas) {
          four.zero_grad();
          const Tensor of_replicas = loss_of(replicated, mine);
          backward(of_replicas);
          four.step();
          const double wanted = loss.template item<double>();
          ASSERT_NEAR(of_replicas.template item<double>(), wanted, std::abs(wanted) * tolerance) << "step " << step;
        }
        double mean = loss.template item<double>();
        ASSERT_EQ(of_shards.template item<double>(), mean) << "fully sharded, step " << step;
        ASSERT_EQ(of_parts.template item<double>(), mean) << "ZeRO, step " << step;
        group.all_reduce(std::span(&mean, 1), Reduce::kAverage).wait();
        const double expected = losses[static_cast<size_t>(step)];
        ASSERT_NEAR(mean, expected, std::abs(expected) * tolerance) << size << " ranks, step " << step;
      }
      expect_sharded_parity(sharded.named_parameters(), ddp.named_parameters(), 0, concat(size, " ranks"));
      if (has_replicas)
        expect_sharded_parity(replicated.named_parameters(), ddp.named_parameters(), tolerance, "replicas of shards");
      const NamedTensors zeros = of_zero.named_parameters(), others = ddp.named_parameters();
      const std::vector<Tensor> reference = alone.parameters();
      for (size_t i = 0; i < others.size(); ++i) {
        expect_close(detach(zeros[i].second), detach(others[i].second), 0, concat("ZeRO, ", others[i].first));
        expect_close(detach(others[i].second), detach(reference[i]), tolerance, concat("one rank, ", others[i].first));
      }
    });
    if (testing::Test::HasFatalFailure()) return;
  }
}

// `quick`: what every run does.
struct ProofPart {
  DType dtype;
  std::vector<int> sizes;
};
template <class Make, class Data>
void expect_one_training(const Make& make, const Data& data, const std::vector<ProofPart>& quick) {
  std::vector<ProofPart> parts = quick;
  if (soaking()) parts = {{DType::kF32, {2, 3, 4}}, {DType::kF64, {2, 3, 4}}};
  for (const ProofPart& part : parts) expect_one_training(make(part.dtype), part.sizes, data(part.dtype));
}

TEST(OneTraining, TinyMlp) {
  expect_one_training(
      [](DType dtype) {
        return made(models::mlp({20, 32, 10}), dtype);
      },
      [](DType dtype) {
        return features({24, 20}, dtype);
      },
      {{DType::kF32, {2, 3, 4}}, {DType::kF64, {2, 3, 4}}});
}
TEST(OneTraining, Mlp512x4) {
  expect_one_training(
      [](DType dtype) {
        return made(models::mlp({512, 512, 512, 512, 512, 10}), dtype);
      },
      [](DType dtype) {
        return features({12, 512}, dtype);
      },
      {{DType::kF32, {3}}});
}
TEST(OneTraining, CnnWithBatchNormOverAllRanks) {
  expect_one_training([](DType dtype) { return made(models::fashion_cnn(), dtype); },
                      [](DType dtype) {
                        return features({12, 1, 28, 28}, dtype);
                      },
                      {{DType::kF32, {2}}});
}
TEST(OneTraining, Encoder) {
  const int64_t vocabulary = soaking() ? 8192 : 300;
  expect_one_training([&](DType dtype) { return made(models::Encoder({.vocabulary = vocabulary}), dtype); },
                      [&](DType) { return tokens(12, 4, vocabulary); }, {{DType::kF32, {2}}});
}
TEST(OneTraining, Gpt2) {
  const models::Gpt2Config config{.vocab_size = 65,
                                  .n_positions = 8,
                                  .n_embd = 24,
                                  .n_layer = 2,
                                  .n_head = 2,
                                  .embd_pdrop = 0,
                                  .resid_pdrop = 0,
                                  .attn_pdrop = 0};
  expect_one_training([&](DType dtype) { return made(models::Gpt2(config), dtype); },
                      [](DType) { return tokens(12, 8, 65); }, {{DType::kF32, {2, 3, 4}}, {DType::kF64, {3}}});
}

// ---- random models under random policies

struct RandomNet : nn::Module {
  std::vector<nn::Linear> layers;
  CHORALE_MODULE(RandomNet, layers)
  // Layers in any order, some several times, some not at all.
  Tensor forward(const Tensor& x, const std::vector<size_t>& order) {
    Tensor y = x;
    for (const size_t i : order) y = add(y, tanh(layers[i](y)));
    return y;
  }
};

void expect_random_parity(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const int ranks = pick(2, 4);
  const bool has_replicas = ranks == 4 && pick(0, 2) == 0;
  const auto count = static_cast<size_t>(pick(1, 6));
  const int64_t width = pick(1, 9);
  RandomNet start;
  for (size_t i = 0; i < count; ++i)
    start.layers.emplace_back(width, width, nn::LinearOptions{.bias = pick(0, 1) == 1});
  start = seeded(std::move(start), seed);
  if (count > 1 && pick(0, 3) == 0) set_requires_grad(start.layers[0].weight, false);
  // Groups: a number for each layer; 0 is left to the outermost module, equal ones are one call.
  std::vector<int> group_of(count);
  for (int& g : group_of) g = pick(0, 3);
  std::vector<ReshardAfterForward> policies(4);
  for (ReshardAfterForward& policy : policies) {
    const int kind = pick(0, 3);
    if (kind == 1) policy = true;
    if (kind == 2) policy = false;
    if (kind == 3 && ranks == 4 && !has_replicas) policy = 2;
  }
  const bool ahead = pick(0, 2) == 0;
  struct Pass {
    std::vector<size_t> order;
    bool reduced, clears;
  };
  const int keeps = pick(0, 3);
  std::vector<Pass> passes(static_cast<size_t>(pick(2, 5)));
  for (Pass& pass : passes) {
    for (int i = pick(1, 6); i > 0; --i)
      pass.order.push_back(static_cast<size_t>(pick(0, static_cast<int>(count) - 1)));
    pass.reduced = keeps < 2 || pick(0, 3) > 0;
    pass.clears = keeps == 0 || pick(0, 1) == 1;
  }
  passes.back().reduced = true;
  // Replicas of shards add up in another order. DDP averages what it has averaged before once more, and adds each use
  // of a layer to the gradients of earlier passes, where a group adds the sum of a pass. In f32 that is up to 2e-5
  // where large gradients cancel (seed 2329); in f64 rounding is far from anything that a mistake would do.
  const bool same_sums = !has_replicas && std::all_of(passes.begin(), passes.end(),
                                                      [](const Pass& pass) { return pass.clears && pass.reduced; });
  const double tolerance = same_sums ? 0 : 1e-12;
  const DType dtype = same_sums ? DType::kF32 : DType::kF64;
  start.to(dtype);
  run_ranks(ranks, [&](comm::Group& group) {
    const Mesh mesh = has_replicas ? Mesh(group, {2, 2}, {"replicate", "shard"}) : line(group);
    DistributedDataParallel<RandomNet> reference(clone(start), group,
                                                 {.find_unused_parameters = parallel::FindUnused::kOn});
    RandomNet model = clone(start);
    for (int g = 1; g < 4; ++g) {
      std::vector<nn::Module*> modules;
      for (size_t i = 0; i < count; ++i) {
        if (group_of[i] == g) modules.push_back(&model.layers[i]);
      }
      if (!modules.empty())
        fully_shard(modules, {.mesh = mesh, .reshard_after_forward = policies[static_cast<size_t>(g)]});
    }
    fully_shard(model, {.mesh = mesh, .reshard_after_forward = policies[0]});
    if (ahead) {
      for (size_t i = 0; i + 1 < count; ++i) {
        if (group_of[i] > 0 && group_of[i + 1] > 0)
          set_modules_to_forward_prefetch(model.layers[i], {&model.layers[i + 1]});
      }
    }
    const auto trained = [](NamedTensors all) {
      std::erase_if(all, [](const auto& entry) { return !requires_grad(entry.second); });
      return all;
    };
    optim::Sgd one(trained(reference.named_parameters()), {.lr = 0.05});
    optim::Sgd two(trained(model.named_parameters()), {.lr = 0.05});
    for (size_t s = 0; s < passes.size(); ++s) {
      const Pass& pass = passes[s];
      const Tensor x = pattern({3, width}, group.rank() + 10 * static_cast<double>(s), dtype);
      std::optional<parallel::DataParallelBase::NoSync> alone;
      if (!pass.reduced) alone.emplace(reference);
      set_requires_gradient_sync(model, pass.reduced);
      const Tensor loss = sum(reference(x, pass.order)), other = sum(model(x, pass.order));
      expect_close(other, loss, tolerance, concat("seed ", seed, ", loss of pass ", s));
      if (!requires_grad(loss)) continue;  // only the frozen layer was used
      backward(loss);
      backward(other);
      if (!pass.reduced) continue;
      one.step();
      two.step();
      if (pass.clears) {
        one.zero_grad();
        two.zero_grad();
      }
      expect_sharded_parity(trained(model.named_parameters()), trained(reference.named_parameters()), tolerance,
                            concat("seed ", seed, ", pass ", s));
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

TEST(FullySharded, RandomModelsUnderRandomPoliciesTrainAsReplicasDo) {
  const auto seeds = static_cast<unsigned>(seeds_to_try(100, 5000));
  for (unsigned seed = 0; seed < seeds; ++seed) {
    expect_random_parity(seed);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// ---- ranks that die

// Runs a step in three processes, in which rank 1 kills itself where `arm` puts a hook; the others name it soon.
void expect_survivors_to_name_it(const std::function<void(MlpStack&, const std::function<void()>& die)>& arm) {
  const auto ended = comm::run_processes(3, [&](comm::Group& group) {
    const Mesh mesh = line(group);
    MlpStack model = seeded(MlpStack(3, 16));
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    const Tensor x = pattern({4, 16}, group.rank());
    backward(sum(model(x)));
    if (group.rank() == 1) arm(model, [] { ::raise(SIGKILL); });
    const auto start = std::chrono::steady_clock::now();
    comm::message_blaming(1, [&] {
      backward(sum(model(x)));
      group.barrier().wait();
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  });
  EXPECT_EQ(ended, (std::vector<int>{0, -SIGKILL, 0}));
}

TEST(FullySharded, ARankThatDiesWhileParametersAreGatheredIsNamed) {
  expect_survivors_to_name_it([](MlpStack& model, const std::function<void()>& die) {
    // Its layer's parameters are gathered and so are the next one's; the others wait for those behind.
    model.layers[1].before_forward([die](nn::Module&, std::vector<Tensor>&) { die(); });
  });
}

TEST(FullySharded, ARankThatDiesWhileGradientsAreReducedIsNamed) {
  expect_survivors_to_name_it([](MlpStack& model, const std::function<void()>& die) {
    model.layers[1].after_backward([die](std::vector<Tensor>&, const std::vector<Tensor>&) { die(); });
  });
}

void expect_survivors_of_a_checkpoint(bool saves) {
  // A folder that all processes of this test know.
  const pid_t parent = comm::is_rank_process() ? ::getppid() : ::getpid();
  const auto folder = std::filesystem::temp_directory_path() / concat("chorale-sharded-killed-", parent);
  const auto ended = comm::run_processes(3, [&](comm::Group& group) {
    const Mesh mesh = line(group);
    MlpStack model = seeded(MlpStack(2, 7));
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    snapshot::State state = snapshot::state_of(model.state_dict());
    snapshot::save(group, folder / "good", state);
    const auto die = [&](snapshot::Step step) {
      if (group.rank() == 1 && step == (saves ? snapshot::Step::kWrite : snapshot::Step::kRead)) ::raise(SIGKILL);
    };
    comm::message_blaming(1, [&] {
      if (saves) {
        snapshot::save(group, folder / "new", state, {.on_step = die});
      } else {
        snapshot::load(group, folder / "good", state, {.on_step = die});
      }
    });
  });
  EXPECT_EQ(ended, (std::vector<int>{0, -SIGKILL, 0}));
  EXPECT_TRUE(snapshot::verify(folder / "good").empty());
  EXPECT_FALSE(snapshot::has_checkpoint(folder / "new"));
  std::filesystem::remove_all(folder);
}

TEST(FullySharded, ARankThatDiesWhileACheckpointIsSavedIsNamed) { expect_survivors_of_a_checkpoint(true); }
TEST(FullySharded, ARankThatDiesWhileACheckpointIsLoadedIsNamed) { expect_survivors_of_a_checkpoint(false); }

}  // namespace
}  // namespace chorale::fsdp
