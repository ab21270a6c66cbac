#include "chorale/optim/scheduler.h"

#include "chorale/optim/adam.h"
#include "chorale/optim/optim_test_util.h"
#include "chorale/optim/sgd.h"

namespace chorale::optim {
namespace {

TEST(Scheduler, EachGroupStartsFromItsOwnRate) {
  const Tensor a = leaf({1}), b = leaf({1});
  Sgd optimizer(std::vector<ParameterGroup<SgdOptions>>{{{{"a", a}}, {.lr = 1}}, {{{"b", b}}, {.lr = 4}}});
  Scheduler scheduler(optimizer, step_decay(1, 0.5));
  scheduler.step();
  EXPECT_EQ(scheduler.last_lr(), (Values{0.5, 2}));

  Scheduler own(optimizer, std::vector<Schedule>{step_decay(1, 0.5), scaled_by([](int64_t) { return 3; })});
  own.step();
  EXPECT_EQ(own.last_lr(), (Values{0.25, 6}));
}

TEST(Scheduler, OneCycleMovesTheFirstBetaOfAdam) {
  const Tensor a = leaf({1});
  Adam optimizer({{"a", a}});
  Scheduler scheduler = Scheduler::one_cycle(optimizer, {.max_lr = 1, .steps = 10});
  EXPECT_EQ(optimizer.options().beta1, 0.95);
  EXPECT_NEAR(optimizer.options().lr, 1.0 / 25, 1e-15);
  scheduler.step();
  scheduler.step();
  EXPECT_NEAR(optimizer.options().beta1, 0.85, 1e-15);
  EXPECT_NEAR(optimizer.options().lr, 1, 1e-15);
  for (int step = 2; step < 9; ++step) scheduler.step();
  EXPECT_MESSAGE(StateError, "step 10 of a cycle of 10", scheduler.step());
}

TEST(Scheduler, BadSchedulesAndStatesAreNamed) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}});
  EXPECT_MESSAGE(InvalidArgument, "must be positive, not 0", step_decay(0));
  EXPECT_MESSAGE(InvalidArgument, "milestones must increase", multi_step({3, 2}));
  EXPECT_MESSAGE(InvalidArgument, "warmup_steps must be in [0, 5), not 5", cosine({.warmup_steps = 5, .steps = 5}));
  EXPECT_MESSAGE(InvalidArgument, "2 schedules for 1 groups",
                 Scheduler(optimizer, std::vector<Schedule>(2, step_decay(1))));
  EXPECT_MESSAGE(InvalidArgument, "a schedule is empty", Scheduler(optimizer, Schedule{}));
  EXPECT_MESSAGE(InvalidArgument, "factor must be below 1", PlateauScheduler(optimizer, {.factor = 1}));
  Scheduler scheduler(optimizer, step_decay(1));
  const PlateauScheduler plateau(optimizer);
  EXPECT_MESSAGE(InvalidArgument, "missing: steps, base/0", scheduler.load_state_dict(plateau.state_dict()));
}

}  // namespace
}  // namespace chorale::optim
