// One step of training: forward, backward, gradients averaged over ranks, update. Holds everything that a step changes
// besides the model: optimizer, schedule, loss scale, compression.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "chorale/base/generator.h"
#include "chorale/optim/grad_scaler.h"
#include "chorale/optim/scheduler.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/train/split_model.h"
#include "chorale/train/task.h"

namespace chorale::train {

// The module that is wrapped: a task's model with the loss behind it. Where ranks have parts of the model, its slots
// hold sharded tensors while it runs.
class Objective final : public nn::Module {
 public:
  using Forward = std::function<Outcome(const Tensor& x, const Tensor& y)>;
  // `compiled`: stands for the task's forward; empty: not compiled.
  Objective(Task& task, const SplitModel& split, Forward compiled)
      : task_(&task), split_(&split), compiled_(std::move(compiled)) {}
  const char* type_name() const override { return "Objective"; }
  void visit_members(nn::MemberVisitor& visitor) override { visitor.module("model", task_->model()); }
  Outcome forward(const Tensor& x, const Tensor& y) {
    const SplitModel::Shown parts(*split_);
    return compiled_ ? compiled_(x, y) : task_->forward({x, y});
  }
  Outcome operator()(const Tensor& x, const Tensor& y) { return nn::call(*this, x, y); }

 private:
  Task* task_;
  const SplitModel* split_;
  Forward compiled_;
};

// Of this rank's part of a batch.
struct StepResult {
  double loss = 0;
  int64_t right = 0;
};
// What became of the gradients, which are the same on all ranks.
struct UpdateResult {
  double gradient_norm = 0;  // only with clipping
  std::string problem{};     // why nothing was updated: a number that is not finite; empty: all is well
};

class Stepper {
 public:
  // The task, the options and the ranks must outlive it. `steps` are to be done in all. Where the ranks say so, the
  // model is split first.
  Stepper(Task& task, const TrainOptions& options, int64_t steps, const JobRanks& ranks);

  // A step is compute() and then update(). `next` gives this rank's examples, in as many pieces as the options say.
  StepResult compute(const std::function<data::Example()>& next);
  // Changes the model, unless gradients are not finite and the options say that this ends the job.
  UpdateResult update();
  // After compute(): does it again, on this rank alone, and returns where numbers stop being finite ("" if they do
  // not).
  std::string find_not_finite();

  double lr() const { return optimizer_->lr(); }
  const optim::Optimizer& optimizer() const { return *optimizer_; }
  parallel::DataParallelBase& ddp() { return ddp_; }

  const SplitModel& split() const { return split_; }

  // Model and training as this rank has them, for a checkpoint (train/checkpoint.h has the keys).
  snapshot::State state() const;
  // Takes over a checkpoint of any number of ranks and any split. All ranks call it.
  void load(const std::filesystem::path& folder);

 private:
  Outcome forward(const data::Example& batch);
  bool stops_at_nan() const { return options_.on_nan == "stop"; }
  bool gradients_are_finite();

  const TrainOptions& options_;
  Task& task_;
  const JobRanks& ranks_;
  const SplitModel split_;
  parallel::DistributedDataParallel<Objective> ddp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::Scheduler scheduler_;
  optim::GradScaler scaler_;
  std::shared_ptr<parallel::PowerSgd> power_sgd_;  // null: not used
  // To repeat the step.
  std::vector<data::Example> examples_;
  RandomStream random_before_{};
};

}  // namespace chorale::train
