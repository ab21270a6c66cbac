// One step of training: forward, backward, gradients averaged over ranks, update. Holds everything that a step changes
// besides the model: optimizer, schedule, loss scale, compression.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "chorale/optim/grad_scaler.h"
#include "chorale/optim/scheduler.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/tensor/named_tensors.h"
#include "chorale/train/task.h"

namespace chorale::train {

// The module that is wrapped: a task's model with the loss behind it.
class Objective final : public nn::Module {
 public:
  explicit Objective(Task& task) : task_(&task) {}
  const char* type_name() const override { return "Objective"; }
  void visit_members(nn::MemberVisitor& visitor) override { visitor.module("model", task_->model()); }
  Outcome forward(const Tensor& x, const Tensor& y) { return task_->forward({x, y}); }
  Outcome operator()(const Tensor& x, const Tensor& y) { return nn::call(*this, x, y); }

 private:
  Task* task_;
};

// Of this rank's part of a batch.
struct StepResult {
  double loss = 0;
  int64_t right = 0;
  double gradient_norm = 0;  // of all ranks' average; only with clipping
};

class Stepper {
 public:
  // The task and the options must outlive it. `steps` are to be done in all.
  Stepper(Task& task, const TrainOptions& options, int64_t steps, const comm::Group& group);

  // `next` gives this rank's examples, in as many pieces as the options say.
  StepResult step(const std::function<data::Example()>& next);

  double lr() const { return optimizer_->lr(); }
  const optim::Optimizer& optimizer() const { return *optimizer_; }
  parallel::DataParallelBase& ddp() { return ddp_; }

  // What is the same on all ranks, less the model.
  NamedTensors state() const;
  void load_state(const NamedTensors& state);
  // What is this rank's own.
  bool has_own_state() const { return power_sgd_ != nullptr; }
  NamedTensors own_state() const { return power_sgd_->state_dict(); }
  void load_own_state(const NamedTensors& state) { power_sgd_->load_state_dict(state); }
  // What another number of ranks can use of it.
  static NamedTensors shared_part(const NamedTensors& own_state);

 private:
  Outcome forward(const data::Example& batch);

  const TrainOptions& options_;
  parallel::DistributedDataParallel<Objective> ddp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::Scheduler scheduler_;
  optim::GradScaler scaler_;
  std::shared_ptr<parallel::PowerSgd> power_sgd_;  // null: not used
};

}  // namespace chorale::train
