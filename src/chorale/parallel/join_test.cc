#include "chorale/reducer/join.h"

#include <gmock/gmock.h>

#include <optional>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using testing::HasSubstr;

// spec: test_ddp_grad_div_uneven_inputs
TEST(Join, SumsAreDividedByTheInitialSizeOrByTheRanksThatAreLeft) {
  for (bool initial : {false, true}) {
    run_ranks(3, [initial](comm::Group& group) {
      const int size = group.size();
      DistributedDataParallel ddp(Linear(5, 5, {.bias = false}), group, {.bucket_cap_mb = 1});
      join({&ddp}, {.divide_by_initial_size = initial}, [&] {
        for (int step = 0; step < (group.rank() == 0 ? 3 : 5); ++step) {
          backward(sum(ddp(full({1, 5}, 50.0))));
          const float g = gradient(ddp.module().weight).to_vector<float>()[0];
          const float expected =
              initial && step >= 3 ? 50.0f * static_cast<float>(size - 1) / static_cast<float>(size) : 50.0f;
          EXPECT_NEAR(g, expected, 1e-4) << step;
          ddp.zero_grad();
        }
      });
      // Afterwards it is all of them again.
      backward(sum(ddp(full({1, 5}, 50.0))));
      EXPECT_NEAR(gradient(ddp.module().weight).to_vector<float>()[0], 50, 1e-4);
    });
  }
}

struct Counts : nn::Module {
  Linear lin{1, 1};
  nn::Buffer count{zeros({1})};
  int rank = 0;
  CHORALE_MODULE(Counts, lin, count)
  Tensor forward(const Tensor& x) {
    add_(count, rank + 1);
    return lin(x);
  }
};

TEST(Join, BuffersComeFromTheHighestRankThatHasInputs) {
  run_ranks(3, [](comm::Group& group) {
    Counts net;
    net.rank = group.rank();
    DistributedDataParallel ddp(net, group);
    // Rank 2 gives what it had after step 0, which is 3; rank 0 is alone in step 2 and goes on from its own.
    const std::vector<std::vector<float>> expected{{1, 3 + 1, 4 + 1}, {2}, {3, 3 + 3}};
    join({&ddp}, {}, [&] {
      for (float count : expected[static_cast<size_t>(group.rank())]) {
        backward(sum(ddp(ones({1, 1}))));
        EXPECT_EQ(ddp.module().count.item<float>(), count);
      }
    });
    EXPECT_EQ(ddp.module().count.item<float>(), 5);  // the last one's
  });
}

// Notes whose state counts in the end.
struct Witness : Joinable {
  const comm::Group* group = nullptr;
  int seen = -1;
  const comm::Group& join_group() const override { return *group; }
  void shadow_step(Join&) override {}
  void after_join(int authority) override { seen = authority; }
};

// spec: test_ddp_join_model_equivalence
TEST(Join, TrainingEqualsAsManyStepsOfOneRank) {
  for (int size : {2, 3}) {
    run_ranks(size, [](comm::Group& group) {
      const int n = group.size();
      Linear net = seeded(Linear(10, 10, {.bias = false}), 1), local = nn::clone(net);
      const Tensor x = pattern({3, 10}, 1);
      const auto descend = [](Linear& model, double lr) {
        const NoGrad quiet;
        sub_(model.weight, mul(gradient(model.weight), lr));
        model.zero_grad();
      };
      DistributedDataParallel ddp(net, group);
      join({&ddp}, {}, [&] {
        for (int step = 0; step < 2 * (group.rank() + 1); ++step) {
          backward(sum(ddp(x)));
          descend(ddp.module(), 0.03 * n);
        }
      });
      for (int step = 0; step < n * (n + 1); ++step) {
        backward(sum(local(x)));
        descend(local, 0.03);
      }
      expect_close(ddp.module().weight, local.weight);
    });
  }
}

struct Tasks : nn::Module {
  Task first, second;
  int rank = 0, skipping = 1;
  CHORALE_MODULE(Tasks, first, second)
  Tensor forward(const Tensor& x) { return rank == skipping ? second(x) : second(first(x)); }
};
struct Convolutions : nn::Module {
  nn::Conv2d a{1, 4, {.kernel = {5}}}, b{4, 6, {.kernel = {5}}}, c{6, 8, {.kernel = {5}}};
  CHORALE_MODULE(Convolutions, a, b, c)
  Tensor forward(const Tensor& x) { return relu(c(relu(b(relu(a(x)))))); }
};

enum class Mode { kEveryStep, kSomeSteps, kThrow };

template <class M>
void uneven(const comm::Group& group, M net, const Tensor& input, const std::vector<int>& steps, Mode mode, int number,
            const std::optional<CommHook>& hook) {
  const int own = steps[static_cast<size_t>(group.rank())];
  DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 1});
  if (hook) ddp.register_comm_hook(*hook);
  int done = 0;
  const auto body = [&] {
    for (int step = 0; step < own; ++step) {
      std::optional<DataParallelBase::NoSync> scope;
      if (mode == Mode::kSomeSteps && step % (number + 2) != 0) scope.emplace(ddp);
      // Updates go up the gradient: down the mean square, so that outputs stay finite.
      const Tensor y = ddp(input);
      backward(mul(mean(mul(y, y)), -0.01));
      ++done;
      ascend(ddp.module());
      ddp.zero_grad();
    }
  };
  const int fewest = *std::min_element(steps.begin(), steps.end());
  if (mode == Mode::kThrow) {
    const std::string error = message_of<StateError>([&] { join({&ddp}, {.throw_when_one_ends = true}, body); });
    EXPECT_TRUE(has(error, own == fewest ? "rank " + std::to_string(group.rank()) + " has run out of inputs"
                                         : "another rank has run out of inputs"));
    EXPECT_EQ(done, fewest);
    return;
  }
  Witness witness;
  witness.group = &group;
  join({&ddp, &witness}, {}, body);
  EXPECT_EQ(done, own);
  // The last rank among those with most steps.
  const auto last = std::max_element(steps.rbegin(), steps.rend());
  EXPECT_EQ(witness.seen, steps.rend() - last - 1);
  for (const auto& [name, tensor] : ddp.module().state_dict()) expect_same_on_all_ranks(group, tensor, name);
  EXPECT_TRUE(ddp.log().join_uneven_inputs);
}

class UnevenInputs : public testing::TestWithParam<std::vector<int>> {};  // steps of each rank
INSTANTIATE_TEST_SUITE_P(Join, UnevenInputs,
                         testing::Values(std::vector{0, 2}, std::vector{0, 3}, std::vector{0, 10}, std::vector{5, 7},
                                         std::vector{5, 8}, std::vector{5, 15}, std::vector{0, 1, 2, 2},
                                         std::vector{0, 1, 3, 3}, std::vector{0, 5, 10, 10}, std::vector{5, 6, 7, 7},
                                         std::vector{5, 6, 8, 8}, std::vector{5, 10, 15, 15}, std::vector{3, 0, 1}));

// Smaller layers and pictures than the scenario's, for the time of it.
// spec: test_ddp_uneven_inputs
TEST_P(UnevenInputs, RanksWithFewerTakePartUntilAllHaveEnded) {
  const CommHook average{"average", [](GradBucket& bucket) {
                           div_(bucket.buffer(), bucket.group().size());
                           return bucket.group().all_reduce(bucket.buffer()).future();
                         }};
  const std::vector<int>& steps = GetParam();
  for (Mode mode : {Mode::kEveryStep, Mode::kSomeSteps, Mode::kThrow}) {
    run_ranks(static_cast<int>(steps.size()), [&](comm::Group& group) {
      uneven(group, seeded(BatchNormNet(), 1), ones({1, 2}), steps, mode, 0, {});
      uneven(group, seeded(Convolutions(), 1), ones({1, 1, 20, 20}), steps, mode, 1, {});
      uneven(group, seeded(Linear(100, 100, {.bias = false}), 1), ones({1, 100}), steps, mode, 2, {});
      for (int skipping : {1, 0}) {
        Tasks tasks;
        tasks.rank = group.rank();
        tasks.skipping = skipping;
        uneven(group, tasks, ones({2, 2}), steps, mode, 3, {});
      }
      uneven(group, seeded(Linear(100, 100, {.bias = false}), 1), ones({1, 100}), steps, mode, 4, average);
      const auto compression = std::make_shared<PowerSgd>(
          PowerSgdOptions{.rank = 1, .start_iteration = 1, .error_feedback = false, .warm_start = false});
      uneven(group, seeded(Linear(100, 100, {.bias = false}), 1), ones({1, 100}), steps, mode, 5,
             power_sgd_hook(compression));
    });
  }
}

struct Communicating : nn::Module {
  Linear lin{2, 40};
  const comm::Group* group = nullptr;
  CHORALE_MODULE(Communicating, lin)
  Tensor forward(const Tensor& x) {
    const Tensor y = lin(x);
    Tensor copy = clone(detach(y));
    group->all_reduce(copy).wait();
    return y;
  }
};

template <class M>
void end_at_once(const comm::Group& group, M net) {
  DistributedDataParallel ddp(net, group);
  int done = 0;
  const std::string error = message_of<StateError>([&] {
    join({&ddp}, {.throw_when_one_ends = true}, [&] {
      for (int step = 0; step < (group.rank() == 0 ? 10 : 5); ++step) {
        backward(sum(ddp(pattern({10, 2}, group.rank()))));
        ++done;
        ascend(ddp.module());
        ddp.zero_grad();
      }
    });
  });
  EXPECT_EQ(done, 5);
  EXPECT_TRUE(has(error, group.rank() == 0 ? "another rank" : "rank " + std::to_string(group.rank()) + " has run out"));
  for (const Tensor& p : ddp.parameters()) expect_same_on_all_ranks(group, p);
}

// spec: test_ddp_uneven_inputs_stop_iteration_sync_bn
TEST(Join, AForwardThatCommunicatesItselfEndsOnAllRanksAtOnce) {
  run_ranks(3, [](comm::Group& group) {
    Communicating net = seeded(Communicating(), 1);
    net.group = &group;
    end_at_once(group, net);
    BatchNormNet norm = seeded(BatchNormNet(), 1);
    convert_sync_batchnorm(norm, group);
    end_at_once(group, norm);
  });
}

// A user who forgot join() is told of it, in the forward that waits for buffers as in the backward that waits for
// gradients.
template <class M>
void train_unevenly(comm::Group& group, M net) {
  std::optional<DistributedDataParallel<M>> ddp(std::in_place, std::move(net), group);
  const auto step = [&] { backward(sum((*ddp)(ones({2, 2})))); };
  step();
  if (group.rank() == 0) {
    ddp.reset();
  } else {
    EXPECT_THAT(message_of<CommError>(step),
                HasSubstr("DistributedDataParallel waits for gradients of every rank: where ranks have different "
                          "numbers of batches, train inside of parallel::join"));
  }
}
TEST(Join, WithoutItRanksWithMoreBatchesAreToldOfIt) {
  run_ranks(2, [](comm::Group& group) {
    train_unevenly(group, Linear(2, 2));
    train_unevenly(group, BatchNormNet());
  });
}

// spec: test_ddp_uneven_input_join_disable
TEST(Join, SwitchedOffItChangesNothing) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Linear(1, 1), group.rank()), group);
    const Tensor x = full({1, 1}, group.rank());
    const JoinOptions off{.enabled = false};
    join({&ddp}, off, [&] {
      for (int step = 0; step < 5; ++step) {
        EXPECT_FALSE(ddp.current_join()->options().enabled);
        ddp.zero_grad();
        backward(sum(ddp(x)));
        EXPECT_NEAR(gradient(ddp.module().weight).item<float>(), 1, 1e-6);
      }
    });
    EXPECT_FALSE(ddp.log().join_uneven_inputs);
    for (const Tensor& p : ddp.parameters()) expect_same_on_all_ranks(group, p);
  });
}

struct Throws : nn::Module {
  Linear lin{1, 1};
  CHORALE_MODULE(Throws, lin)
  Tensor forward(const Tensor&) { throw InvalidArgument("forward fails"); }
};

// spec: test_ddp_uneven_input_exception
TEST(Join, AnExceptionGoesThroughAtOnce) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(Throws(), group);
    EXPECT_EQ(message_of<InvalidArgument>([&] { join({&ddp}, {}, [&] {
                                                  ddp(ones({1, 1}));
                                                }); }),
              "forward fails; in Throws()");
    EXPECT_EQ(ddp.current_join(), nullptr);
  });
}

}  // namespace
}  // namespace chorale::parallel
