#include "chorale/parallel/power_sgd.h"

#include "chorale/base/debug_level.h"
#include "chorale/io/safetensors.h"
#include "chorale/io/sharded.h"
#include "chorale/op/samples.h"
#include "chorale/optim/sgd.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::parallel {
namespace {

// A layer whose gradient the test chooses: d(sum(weight * g))/d(weight) = g.
struct Chosen : nn::Module {
  nn::Parameter weight;
  CHORALE_MODULE(Chosen, weight)
  explicit Chosen(const Shape& sizes) : weight(zeros(sizes)) {}
  Tensor forward(const Tensor& g) { return sum(mul(weight, g)); }
};

// What the hook makes of this rank's gradient, step by step.
class Compressed {
 public:
  Compressed(const Shape& sizes, const comm::Group& group, const PowerSgdOptions& options, bool batched = false)
      : state(std::make_shared<PowerSgd>(options)), ddp_(Chosen(sizes), group) {
    ddp_.register_comm_hook(batched ? batched_power_sgd_hook(state) : power_sgd_hook(state));
  }
  Tensor step(const Tensor& g) {
    ddp_.zero_grad();
    backward(ddp_(g));
    return clone(gradient(ddp_.module().weight));
  }
  const std::shared_ptr<PowerSgd> state;

 private:
  DistributedDataParallel<Chosen> ddp_;
};

double relative_error(const Tensor& x, const Tensor& wanted) {
  return norm(x - wanted).item<double>() / norm(wanted).item<double>();
}
Tensor sample32(const Shape& sizes, int seed) { return to(op::sample(sizes, seed), DType::kF32); }

// spec: test_ddp_hook_parity_powerSGD
TEST(PowerSgd, LeavesSmallGradientsUncompressed) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [](comm::Group& group) {
      for (const bool warm_start : {true, false}) {
        DistributedDataParallel ddp(seeded(Linear(1, 5), 0), group);
        const auto state =
            std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start_iteration = 2, .warm_start = warm_start});
        ddp.register_comm_hook(power_sgd_hook(state));
        const int steps = group.size() == 2 ? 100 : 10;  // more ranks wait for a core
        for (int step = 0; step < steps; ++step) {
          ddp.zero_grad(false);
          backward(sum(ddp(full({1, 1}, group.rank()))));
          expect_close(gradient(ddp.module().weight), full({5, 1}, (group.size() - 1) / 2.0), concat("step ", step));
        }
        EXPECT_EQ(state->iteration(), steps);
        EXPECT_EQ(state->sent_bytes(), state->gradient_bytes());
      }
    });
  }
}

TEST(PowerSgd, ReproducesAGradientOfItsRank) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [](comm::Group& group) {
      for (const int64_t rank : {1, 3}) {
        // Every rank has a multiple of the same columns, so that the average has no more of them than each.
        const Tensor columns = sample32({64, rank}, 1), rows = sample32({rank, 64}, 2);
        const Tensor own = mul(matmul(columns, rows), group.rank() + 1);
        const Tensor average = mul(matmul(columns, rows), (group.size() + 1) / 2.0);
        for (const bool batched : {false, true}) {
          Compressed compressed({64, 64}, group, {.rank = rank, .start_iteration = 2}, batched);
          for (int step = 0; step < 5; ++step) {
            const Tensor result = compressed.step(own);
            EXPECT_LT(relative_error(result, average), 1e-5) << "step " << step << ", rank " << rank;
            expect_same_on_all_ranks(group, result);
          }
          const int64_t exact = 2 * 64 * 64 * 4, factors = 3 * 2 * 64 * rank * 4;
          EXPECT_EQ(compressed.state->sent_bytes(), exact + factors);
          EXPECT_EQ(compressed.state->gradient_bytes(), 5 * 64 * 64 * 4);
        }
      }
    });
  }
}

TEST(PowerSgd, ErrorFeedbackSendsInTheEndWhatWasMissedBefore) {
  run_ranks(2, [](comm::Group& group) {
    const Tensor own = sample32({32, 32}, group.rank());
    const Tensor average = div(add(sample32({32, 32}, 0), sample32({32, 32}, 1)), 2);
    const auto mean_error = [&](bool error_feedback) {
      Compressed compressed({32, 32}, group,
                            {.rank = 2, .start_iteration = 2, .error_feedback = error_feedback, .warm_start = false});
      for (int step = 0; step < 2; ++step) EXPECT_LT(relative_error(compressed.step(own), average), 1e-6);
      const int steps = 60;
      Tensor total = zeros({32, 32});
      for (int step = 0; step < steps; ++step) add_(total, compressed.step(own));
      return relative_error(div(total, steps), average);
    };
    // Random directions of 2 out of 32 dimensions lose most of a gradient without structure; the sum over steps does
    // not.
    EXPECT_LT(mean_error(true), 0.25);
    EXPECT_GT(mean_error(false), 0.5);
  });
}

TEST(PowerSgd, WarmStartFindsTheLargestDirections) {
  run_ranks(2, [](comm::Group& group) {
    // One large direction among noise: the best factors of rank 1 are found after a few steps from the last ones.
    const Tensor large = mul(matmul(sample32({32, 1}, 1), sample32({1, 32}, 2)), 1);
    const Tensor own = add(large, sample32({32, 32}, 3), 0.5);
    Compressed warm({32, 32}, group, {.rank = 1, .start_iteration = 2, .error_feedback = false});
    Compressed cold({32, 32}, group, {.rank = 1, .start_iteration = 2, .error_feedback = false, .warm_start = false});
    double of_warm = 0, of_cold = 0;
    for (int step = 0; step < 8; ++step) {
      of_warm = relative_error(warm.step(own), own);
      of_cold = std::max(of_cold, relative_error(cold.step(own), own));
      if (step < 2) of_cold = 0;
    }
    EXPECT_LT(of_warm, of_cold);
    // Zeros are zeros, not NaN.
    expect_close(cold.step(zeros({32, 32})), zeros({32, 32}));
  });
}

// A matrix that is worth compressing, and what is not.
struct Mixed : nn::Module {
  nn::Parameter wide{zeros({16, 4, 2, 2})}, thin{zeros({16, 2})}, vector{zeros({100})}, scalar{zeros({})};
  CHORALE_MODULE(Mixed, wide, thin, vector, scalar)
  Tensor forward(const Tensor& x) {
    // A matrix of rank 1, seen as [16, 16]: 1 + i in each column.
    const Tensor g = reshape(arange(1, 17, 1, DType::kF32), {16, 1, 1, 1});
    return mul(add(add(add(sum(mul(wide, g)), sum(mul(thin, 2))), sum(mul(vector, 3))), mul(scalar, 4)), sum(x));
  }
};

TEST(PowerSgd, DecidesForEachMatrixByItself) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Mixed(), group);
    const auto state = std::make_shared<PowerSgd>(PowerSgdOptions{.start_iteration = 2});
    ddp.register_comm_hook(power_sgd_hook(state));
    for (int step = 0; step < 4; ++step) {
      ddp.zero_grad();
      backward(ddp(full({1}, group.rank())));
      const Tensor wide = gradient(ddp.module().wide);
      EXPECT_LT(relative_error(flatten(select(wide, 0, 3)), full({16}, 2.0)), 1e-5);
      expect_close(gradient(ddp.module().thin), full({16, 2}, 1.0));
      expect_close(gradient(ddp.module().vector), full({100}, 1.5));
      expect_close(gradient(ddp.module().scalar), full({}, 2.0));
    }
    const int64_t all = (256 + 32 + 100 + 1) * 4, factors = (32 + 32 + 100 + 1) * 4;
    EXPECT_EQ(state->sent_bytes(), 2 * all + 2 * factors);
  });
}

TEST(PowerSgd, WorksOnAWrappersBuffer) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Chosen({64, 64}), group);
    const auto state = std::make_shared<PowerSgd>(PowerSgdOptions{.start_iteration = 2});
    ddp.register_comm_hook(fp16_compress_wrapper(power_sgd_hook(state)));
    const Tensor g = matmul(sample32({64, 1}, 1), sample32({1, 64}, 2));
    for (int step = 0; step < 4; ++step) {
      ddp.zero_grad();
      backward(ddp(mul(g, group.rank() * 2)));
      EXPECT_LT(relative_error(gradient(ddp.module().weight), g), 1e-2) << step;
    }
  });
}

TEST(PowerSgd, RefusesAStartBeforeBucketsAreFinal) {
  EXPECT_THROW(PowerSgd({.start_iteration = 1}), InvalidArgument);
  EXPECT_THROW(PowerSgd({.start_iteration = 1, .error_feedback = false}), InvalidArgument);
  EXPECT_THROW(PowerSgd({.start_iteration = 1, .warm_start = false}), InvalidArgument);
  EXPECT_THROW(PowerSgd({.rank = 0}), InvalidArgument);
  EXPECT_NO_THROW(PowerSgd({.start_iteration = 0, .error_feedback = false, .warm_start = false}));
  EXPECT_THROW(PowerSgd().load_state_dict({}), InvalidArgument);
}

// Two layers of 64 x 64, which learn what two others do.
struct Student : nn::Module {
  Linear a{64, 64, {.bias = false}}, b{64, 64, {.bias = false}};
  CHORALE_MODULE(Student, a, b)
  explicit Student(int seed) {
    const NoGrad quiet;
    for (const Tensor& p : parameters()) copy_(p, op::sample(p.sizes(), seed++, -0.2, 0.2));
  }
  Tensor forward(const Tensor& x) { return b(tanh(a(x))); }
};

class Training {
 public:
  Training(const comm::Group& group, CommHook hook, const nn::Module* start = nullptr)
      : group_(group), ddp(Student(1), group), optimizer(ddp.named_parameters(), {.lr = 0.1, .momentum = 0.9}) {
    if (start) ddp.module().load_state_dict(start->state_dict());
    ddp.register_comm_hook(std::move(hook));
  }
  void step(int number) {
    const Tensor x = sample32({16, 64}, 1000 + number * group_.size() + group_.rank());
    optimizer.zero_grad();
    backward(loss(x));
    optimizer.step();
  }
  Tensor loss(const Tensor& x) {
    const NoGrad quiet;
    const Tensor wanted = teacher_(x);
    const EnableGrad again;
    return mse_loss(ddp(x), wanted);
  }

 private:
  const comm::Group& group_;
  Student teacher_{50};

 public:
  DistributedDataParallel<Student> ddp;
  optim::Sgd optimizer;
};

TEST(PowerSgd, TrainsAsWellAsAllReduceWithAnEighthOfTheBytes) {
  run_ranks(2, [](comm::Group& group) {
    const auto state = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 3, .start_iteration = 2});
    Training plain(group, allreduce_hook()), compressed(group, power_sgd_hook(state));
    for (int step = 0; step < 300; ++step) {
      plain.step(step);
      compressed.step(step);
    }
    const Tensor x = sample32({256, 64}, 7);
    const NoGrad quiet;
    const double first = mse_loss(Student(1).forward(x), Student(50).forward(x)).item<double>();
    const double of_plain = plain.loss(x).item<double>(), of_compressed = compressed.loss(x).item<double>();
    const double share = static_cast<double>(state->sent_bytes()) / static_cast<double>(state->gradient_bytes());
    if (group.rank() == 0) {
      std::cout << "loss at first " << first << ", after 300 steps of all-reduce " << of_plain << ", of PowerSGD "
                << of_compressed << "; bytes sent by all-reduce " << state->gradient_bytes() << ", by PowerSGD "
                << state->sent_bytes() << "\n";
    }
    EXPECT_LT(of_plain, first / 2);
    EXPECT_LT(of_compressed, of_plain * 1.05);
    EXPECT_LE(share, 1.0 / 8);
    expect_same_on_all_ranks(group, compressed.ddp.module().a.weight);
  });
}

void expect_same_state(const PowerSgd& a, const PowerSgd& b) {
  EXPECT_EQ(a.options().rank, b.options().rank);
  EXPECT_EQ(a.options().start_iteration, b.options().start_iteration);
  EXPECT_EQ(a.options().min_compression_rate, b.options().min_compression_rate);
  EXPECT_EQ(a.options().error_feedback, b.options().error_feedback);
  EXPECT_EQ(a.options().warm_start, b.options().warm_start);
  EXPECT_EQ(a.options().seed, b.options().seed);
  EXPECT_EQ(a.iteration(), b.iteration());
  EXPECT_EQ(a.gradient_bytes(), b.gradient_bytes());
  EXPECT_EQ(a.sent_bytes(), b.sent_bytes());
  const auto one = a.state_dict(), other = b.state_dict();
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].first, other[i].first);
    EXPECT_TRUE(equal_bits(one[i].second, other[i].second)) << one[i].first;
  }
}

// Rank 0 saves weights and state; all ranks go on from there, beside those that were never interrupted. The group is no
// part of the state: that of the new wrapper is another one. Nor is a generator: its numbers follow from the seed and
// the step, which are.
void save_and_go_on(const comm::Group& group, const PowerSgdOptions& options, const std::filesystem::path& path) {
  const auto step = [&](auto& ddp, auto& optimizer, int number) {
    optimizer.zero_grad();
    backward(sum(square(ddp(pattern({7, ddp.module().weight.size(1)}, number)))));
    optimizer.step();
  };
  // The row's layer, which is too small to be compressed, and one that is large enough. Its batches are the same on all
  // ranks, so that all have the errors that rank 0 saves.
  for (const Shape& sizes : {Shape{1, 5}, Shape{24, 24}}) {
    const auto first = std::make_shared<PowerSgd>(options);
    DistributedDataParallel one(seeded(Linear(sizes[0], sizes[1]), 1), group);
    one.register_comm_hook(power_sgd_hook(first));
    optim::Sgd optimizer(one.named_parameters(), {.lr = 0.01});
    for (int number = 0; number < 10; ++number) step(one, optimizer, number);
    if (group.rank() == 0) {
      NamedTensors saved = one.module().state_dict();
      for (const auto& [name, tensor] : first->state_dict()) saved.emplace_back("power_sgd." + name, tensor);
      io::save(path, saved);
    }
    group.barrier().wait();

    NamedTensors weights, state;
    for (const auto& [name, tensor] : io::load(path).tensors) {
      const bool is_state = name.starts_with("power_sgd.");
      (is_state ? state : weights).emplace_back(is_state ? name.substr(10) : name, tensor);
    }
    const auto second = std::make_shared<PowerSgd>();
    second->load_state_dict(state);
    expect_same_state(*first, *second);
    const bool compresses = sizes[0] > 1;
    EXPECT_EQ(state.size(), 9u + (compresses ? options.error_feedback + options.warm_start : 0u));
    EXPECT_EQ(first->sent_bytes() < first->gradient_bytes(), compresses);

    const comm::Group other_group = group.duplicate();
    DistributedDataParallel other(Linear(sizes[0], sizes[1]), other_group);
    other.module().load_state_dict(weights);
    other.register_comm_hook(power_sgd_hook(second));
    optim::Sgd other_optimizer(other.named_parameters(), {.lr = 0.01});
    for (int number = 10; number < 20; ++number) {
      step(one, optimizer, number);
      step(other, other_optimizer, number);
    }
    expect_same_state(*first, *second);
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(gradient(one.parameters()[i]).defined());
      EXPECT_TRUE(equal_bits(gradient(one.parameters()[i]), gradient(other.parameters()[i])));
      EXPECT_TRUE(equal_bits(one.parameters()[i], other.parameters()[i]));
    }
    group.barrier().wait();  // rank 0 writes the next file when all have read this one
  }
}

// What the log says meanwhile.
std::string log_of(const std::function<void()>& what) {
  testing::internal::CaptureStderr();
  what();
  return testing::internal::GetCapturedStderr();
}

// spec: test_ddp_hook_pickling_powerSGD
TEST(PowerSgd, IsSavedByRank0AndRestoredByAll) {
  set_debug_level(DebugLevel::kInfo);
  PowerSgd saved, loaded;
  std::vector<std::pair<std::string, Tensor>> state;
  const std::string on_save = log_of([&] { state = saved.state_dict(); });
  const std::string on_load = log_of([&] { loaded.load_state_dict(state); });
  set_debug_level(DebugLevel::kOff);
  EXPECT_TRUE(has(on_save, "saved without a group")) << on_save;
  EXPECT_EQ(std::count(on_save.begin(), on_save.end(), '\n'), 1) << on_save;
  EXPECT_TRUE(has(on_load, "loaded without a group")) << on_load;
  EXPECT_EQ(std::count(on_load.begin(), on_load.end(), '\n'), 1) << on_load;

  const TemporaryFolder folder;
  run_ranks(2, [&](comm::Group& group) {
    const auto path = folder / "state.safetensors";
    save_and_go_on(group, {.rank = 1, .start_iteration = 4}, path);
    save_and_go_on(group,
                   {.rank = 2,
                    .start_iteration = 4,
                    .min_compression_rate = 1.5,
                    .error_feedback = false,
                    .warm_start = false,
                    .seed = 5},
                   path);
  });
}

TEST(PowerSgd, GoesOnAfterBeingSavedAndRestored) {
  run_ranks(2, [](comm::Group& group) {
    const auto first = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 4, .seed = 5});
    Training one(group, power_sgd_hook(first));
    for (int step = 0; step < 10; ++step) one.step(step);
    const auto state = first->state_dict();
    const auto second = std::make_shared<PowerSgd>(PowerSgdOptions{});
    second->load_state_dict(state);
    EXPECT_EQ(second->iteration(), 10);
    EXPECT_EQ(second->options().rank, 2);
    EXPECT_EQ(second->options().start_iteration, 4);
    EXPECT_EQ(second->options().seed, 5u);
    EXPECT_EQ(second->state_dict().size(), state.size());
    EXPECT_EQ(state.size(), 9u + 4u);  // with errors and directions of two matrices

    Training other(group, power_sgd_hook(second), &one.ddp.module());
    other.optimizer.load_state_dict(one.optimizer.state_dict());
    for (int step = 10; step < 20; ++step) {
      one.step(step);
      other.step(step);
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(equal_bits(gradient(one.ddp.parameters()[i]), gradient(other.ddp.parameters()[i])));
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
