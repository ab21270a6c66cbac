// Local SGD: every rank trains on its own for a while, then parameters are averaged. It sends 1 / period of what
// averaging gradients in every step sends.
//
//   parallel::PeriodicAverager averager(group, {.period = 8, .warmup_steps = 100});
//   parallel::PostLocalSgdOptimizer optimizer(sgd, averager);
//
// During the warm-up gradients should be averaged as usual, and not afterwards: post_local_sgd_hook (comm_hooks.h).
#pragma once

#include <map>

#include "chorale/comm/group.h"
#include "chorale/optim/optimizer.h"

namespace chorale::parallel {

// Replaces values by their averages over the group, in one call. Nothing happens on a rank outside the group.
void average_parameters(std::span<const Tensor> parameters, const comm::Group& group);

// Decides after each step whether, and among which ranks, to average. Used by one thread at a time, in step with the
// averagers of the other ranks.
class ModelAverager {
 public:
  virtual ~ModelAverager() = default;
  // Called once after each step of the optimizer. Parameters without gradient are left alone: they were not trained.
  void average_parameters(std::span<const Tensor> parameters);
  void average_parameters(const optim::Optimizer& optimizer) { average_parameters(optimizer.parameters()); }
  // The same in two parts, for ranks that may die between them (elastic/elastic.h): copies of all these parameters,
  // averaged as is due in this step; none where nothing is due. Whoever takes them over counts the step.
  std::vector<Tensor> averages(std::span<const Tensor> parameters) const;

  // How often it was called; part of what must be saved.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }

 protected:
  // The ranks to average among in this step; null: none.
  virtual const comm::Group* due(int64_t step) const = 0;

 private:
  int64_t step_ = 0;
};

struct PeriodicAveragerOptions {
  int64_t period = 1;
  int64_t warmup_steps = 0;  // nothing is averaged before
};

// Averages in every period-th step, counted from the end of the warm-up. Like the next one it is made by all ranks
// together, and averages in a group of its own.
class PeriodicAverager final : public ModelAverager {
 public:
  PeriodicAverager(const comm::Group& group, const PeriodicAveragerOptions& options);

 private:
  const comm::Group* due(int64_t step) const override;
  comm::Group group_;
  PeriodicAveragerOptions options_;
};

// Often among few, seldom among all: {{2, 2}, {8, 4}, {32, 16}} averages in every second step among pairs of
// neighbouring ranks, in every 8th among 4 and in every 32nd among all 16. Where several are due the longest period
// counts. Steps are counted from the first one.
class HierarchicalAverager final : public ModelAverager {
 public:
  // The longest period must belong to the whole group.
  HierarchicalAverager(const comm::Group& group, const std::map<int64_t, int>& group_size_by_period,
                       int64_t warmup_steps = 0);
  // Levels are given by ascending period.
  struct Level {
    int64_t period;
    comm::Group group;  // this rank's
  };
  const std::vector<Level>& levels() const { return levels_; }

 private:
  const comm::Group* due(int64_t step) const override;
  std::vector<Level> levels_;
  int64_t warmup_steps_;
};

// An optimizer whose steps are followed by the averager's. Neither is owned.
class PostLocalSgdOptimizer {
 public:
  PostLocalSgdOptimizer(optim::Optimizer& optimizer, ModelAverager& averager)
      : optimizer_(optimizer), averager_(averager) {}

  void step();
  // Calls the closure as Optimizer::step does.
  Tensor step(const std::function<Tensor()>& closure);
  void zero_grad(optim::ZeroGrad how = optim::ZeroGrad::kToNone) { optimizer_.zero_grad(how); }

  // The optimizer's, and the averager's step. A state without it (of the optimizer alone) can be loaded: then the
  // averager starts over, with a warning.
  NamedTensors state_dict() const;
  void load_state_dict(const NamedTensors& state);

  optim::Optimizer& optimizer() { return optimizer_; }
  ModelAverager& averager() { return averager_; }

 private:
  optim::Optimizer& optimizer_;
  ModelAverager& averager_;
};

}  // namespace chorale::parallel
