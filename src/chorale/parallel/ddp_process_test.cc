// Ranks that are processes, and ranks that die.
#include <unistd.h>
#include <csignal>

#include "chorale/base/comm_error.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using namespace std::chrono_literals;

TEST(DdpProcesses, TrainAsThreadsDo) {
  const auto train = [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Net(), group.rank()), group);
    Net reference = nn::clone(ddp.module());
    const int64_t rows = 2 * group.size();
    parity_loop(ddp, reference, pattern({rows, 2}, 1), pattern({rows, 4}, 2), 2, 2 * group.rank());
  };
  for (int status : comm::run_processes(3, train)) EXPECT_EQ(status, 0);
}

// Rank 1 dies in this phase of its second step; the others name it.
enum class Phase { kConstruction, kForward, kBackward, kHook, kOptimizer, kJoin };

struct DiesInForward : nn::Module {
  Linear lin{4, 4};
  bool dies = false;
  CHORALE_MODULE(DiesInForward, lin)
  Tensor forward(const Tensor& x) {
    if (dies) raise(SIGKILL);
    return lin(x);
  }
};

void train_until(const comm::Group& group, Phase phase) {
  const bool victim = group.rank() == 1;
  const auto die_in = [&](Phase now) {
    if (victim && now == phase) raise(SIGKILL);
  };
  die_in(Phase::kConstruction);
  DistributedDataParallel ddp(seeded(DiesInForward(), 1), group);
  optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1});
  int step = 0;
  if (phase == Phase::kHook) {
    ddp.register_comm_hook({"dying", [&](GradBucket& bucket) {
                              if (step == 1) die_in(Phase::kHook);
                              return bucket.group().all_reduce(bucket.buffer()).future();
                            }});
  }
  if (phase == Phase::kBackward) {
    after_accumulate(ddp.module().lin.weight, [&](const Tensor&) {
      if (step == 1) die_in(Phase::kBackward);
    });
  }
  const auto steps = [&](int count) {
    for (step = 0; step < count; ++step) {
      ddp.module().dies = victim && phase == Phase::kForward && step == 1;
      optimizer.zero_grad();
      backward(sum(ddp(ones({1, 4}))));
      if (step == 1) die_in(Phase::kOptimizer);
      optimizer.step();
    }
  };
  if (phase == Phase::kJoin) {
    join({&ddp}, {}, [&] {
      steps(victim ? 2 : 4);
      die_in(Phase::kJoin);
    });
  } else {
    steps(4);
  }
}

class Deaths : public testing::TestWithParam<Phase> {};
INSTANTIATE_TEST_SUITE_P(DdpProcesses, Deaths,
                         testing::Values(Phase::kConstruction, Phase::kForward, Phase::kBackward, Phase::kHook,
                                         Phase::kOptimizer, Phase::kJoin));

TEST_P(Deaths, SurvivorsNameTheRankThatDied) {
  const std::vector<int> ends = comm::run_processes(3, [](comm::Group& group) {
    const auto start = std::chrono::steady_clock::now();
    try {
      train_until(group, GetParam());
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peer, 1) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL, 0}));
}

}  // namespace
}  // namespace chorale::parallel
