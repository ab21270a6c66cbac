#include "chorale/train/trainer.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/train/training.h"

namespace chorale::train {

Plan make_plan(const TrainOptions& options, int64_t examples, int ranks) {
  const int64_t pieces = product("ranks and pieces of a batch", {ranks, options.accumulate});
  CHORALE_CHECK(options.batch % pieces == 0, "[train] a batch of ", options.batch, " cannot be dealt to ", ranks,
                " ranks in ", options.accumulate, " pieces equally; choose a multiple of ", pieces);
  Plan plan{.steps_per_epoch = examples / options.batch, .examples_of_rank = options.batch / pieces};
  CHORALE_CHECK(plan.steps_per_epoch > 0, "[train] a batch of ", options.batch, " is larger than the ", examples,
                " training examples; choose a smaller one");
  const int64_t all = product("steps of all epochs", {plan.steps_per_epoch, options.epochs});
  plan.steps = options.steps > 0 ? std::min(options.steps, all) : all;
  return plan;
}

Ending train(const Job& job) { return Training(job).run(); }

}  // namespace chorale::train
