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
#include "chorale/train/full_sharding.h"
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

// The loss of this rank's part of a batch, and how many of its examples were right.
struct StepResult {
  double loss = 0;
  int64_t right = 0;
};
// What became of the gradients, which are the same on all ranks.
struct UpdateResult {
  double gradient_norm = 0;  // only with clipping
  std::string problem{};     // why nothing was updated: a number that is not finite; empty: all is well
};

// Bytes of one rank in a step, where it computes.
struct StepMemory {
  FullSharding::Sizes model;
  int64_t states = 0;       // of the optimizer
  int64_t activations = 0;  // what forward leaves for backward
  int64_t peak = 0;         // of everything that is there
};
// Milliseconds that a step spent on communication in all, and those hidden behind what this rank computed meanwhile.
struct CommunicationTimes {
  double all_ms = 0, hidden_ms = 0;
};

class Stepper {
 public:
  // The task, the options and the ranks must outlive it. `steps` are to be done in all. Where the ranks say so, the
  // model is split first, or sharded by `shard_fully`.
  Stepper(Task& task, const TrainOptions& options, int64_t steps, const JobRanks& ranks,
          const ShardFully& shard_fully = {});

  // Values to begin with, for a model that is sharded: those that the seed gives, or where the options name a model to
  // start from the first rank's `weights` (FullSharding::fill). All ranks call it, unless they load() a checkpoint.
  void start(const NamedTensors& weights);
  // A step is compute(), prepare() and then update(). `next` gives this rank's examples, piece by piece. The loss of a
  // piece counts by its part of `examples`.
  struct Pieces {
    int64_t count = 1;
    double examples = 1;
  };
  StepResult compute(const Pieces& pieces, const std::function<data::Example()>& next);
  // Clips, and looks for what keeps gradients from becoming a step. Where ranks have parts of the model, all call it.
  UpdateResult prepare();
  // Changes the model, unless the result of prepare() is a problem; may find one itself. Asks no other rank. The
  // learning rate is that of the schedule times `lr_scale`.
  void update(UpdateResult& result, double lr_scale = 1);
  // Called after compute(): does it again, on this rank alone, and returns where numbers stop being finite ("" if they
  // do not).
  std::string find_not_finite();
  // Does forward and backward of a piece of a step, and changes nothing by it: fully sharded models only.
  StepMemory rehearse(const data::Example& piece);
  // Whether a fully sharded model computes on a device and its parts stay on the host.
  bool parts_are_elsewhere() const;

  double lr() const { return optimizer_->lr(); }
  optim::Optimizer& optimizer() { return *optimizer_; }
  // Null where the model is fully sharded.
  parallel::DataParallelBase* ddp() { return ddp_.get(); }
  CommunicationTimes communication() const;
  // Running means and the like become those of the first replica.
  void sync_buffers();

  const SplitModel& split() const { return split_; }
  // What was compiled so far, as `chorale graph` reads it; empty where nothing is.
  std::string graphs() const { return graphs_ ? graphs_() : std::string(); }

  // Model and training as this rank has them, for a checkpoint (train/checkpoint.h has the keys).
  snapshot::State state() const;
  // Takes over a checkpoint of any number of ranks and any split. All ranks call it.
  void load(const std::filesystem::path& folder);
  // Schedule and loss scale, for a rank that joins.
  std::string numbers() const;
  void load_numbers(const std::string& text);

 private:
  Outcome forward(const data::Example& batch);
  bool stops_at_nan() const { return options_.on_nan == "stop"; }
  bool gradients_are_finite();
  int64_t state_bytes() const;

  const TrainOptions& options_;
  Task& task_;
  const JobRanks& ranks_;
  const SplitModel split_;
  std::function<std::string()> graphs_;
  std::unique_ptr<FullSharding> sharding_;  // or
  std::unique_ptr<parallel::DistributedDataParallel<Objective>> ddp_;
  Objective objective_;  // of a sharded model
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::Scheduler scheduler_;
  optim::GradScaler scaler_;
  std::shared_ptr<parallel::PowerSgd> power_sgd_;  // null: not used
  // What repeating the step needs.
  std::vector<data::Example> examples_;
  RandomStream random_before_{};
  double waited_s_ = 0;  // in the last step, where the model is fully sharded
};

}  // namespace chorale::train
