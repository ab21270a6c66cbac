#include "chorale/parallel/averaging.h"

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/op/copy.h"

namespace chorale::parallel {
namespace {

constexpr const char* kStep = "averager/step";

void check_warmup(int64_t steps) {
  CHORALE_CHECK(steps >= 0, "[model averaging] a warm-up of ", steps, " steps is not possible");
}
void warn_of_period_1(int64_t period) {
  if (period == 1)
    log_warning(
        "[model averaging] averaging parameters in every step sends as much as averaging gradients does, and is less "
        "exact");
}

}  // namespace

void average_parameters(std::span<const Tensor> parameters, const comm::Group& group) {
  if (!group.is_member() || parameters.empty()) return;
  group.all_reduce_coalesced({parameters.begin(), parameters.end()}, comm::premultiplied_sum(1.0 / group.size()))
      .wait();
}

void ModelAverager::average_parameters(std::span<const Tensor> parameters) {
  if (const comm::Group* group = due(step_)) {
    std::vector<Tensor> trained;
    for (const Tensor& p : parameters) {
      if (gradient(p).defined()) trained.push_back(p);
    }
    parallel::average_parameters(trained, *group);
  }
  ++step_;
}

std::vector<Tensor> ModelAverager::averages(std::span<const Tensor> parameters) const {
  std::vector<Tensor> copies;
  const comm::Group* const group = due(step_);
  if (!group) return copies;
  const NoGrad quiet;
  copies.reserve(parameters.size());
  for (const Tensor& p : parameters) copies.push_back(clone(p));
  parallel::average_parameters(copies, *group);
  return copies;
}

PeriodicAverager::PeriodicAverager(const comm::Group& group, const PeriodicAveragerOptions& options)
    : options_(options) {
  check_warmup(options.warmup_steps);
  CHORALE_CHECK(options.period >= 1, "[PeriodicAverager] expected a period of at least one step, found ",
                options.period);
  warn_of_period_1(options.period);
  group_ = group.duplicate();
}

const comm::Group* PeriodicAverager::due(int64_t step) const {
  const int64_t since = step - options_.warmup_steps;
  return since >= 0 && since % options_.period == 0 ? &group_ : nullptr;
}

HierarchicalAverager::HierarchicalAverager(const comm::Group& group, const std::map<int64_t, int>& group_size_by_period,
                                           int64_t warmup_steps)
    : warmup_steps_(warmup_steps) {
  check_warmup(warmup_steps);
  CHORALE_CHECK(!group_size_by_period.empty(), "[HierarchicalAverager] expected at least one period");
  const int64_t shortest = group_size_by_period.begin()->first;
  CHORALE_CHECK(shortest >= 1, "[HierarchicalAverager] expected periods of at least one step, found ", shortest);
  const auto& [longest, widest] = *group_size_by_period.rbegin();
  CHORALE_CHECK(widest == group.size(), "[HierarchicalAverager] the longest period (", longest,
                ") must be that of the whole group of ", group.size(), " ranks, not of ", widest);
  warn_of_period_1(shortest);
  for (const auto& [period, size] : group_size_by_period) {
    comm::Group::Subgroups groups = group.new_subgroups(size);
    levels_.push_back({period, std::move(groups.groups[static_cast<size_t>(groups.own)])});
  }
}

const comm::Group* HierarchicalAverager::due(int64_t step) const {
  if (step < warmup_steps_) return nullptr;
  for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
    if (step % level->period == 0) return &level->group;
  }
  return nullptr;
}

void PostLocalSgdOptimizer::step() {
  optimizer_.step();
  averager_.average_parameters(optimizer_);
}
Tensor PostLocalSgdOptimizer::step(const std::function<Tensor()>& closure) {
  Tensor loss = optimizer_.step(closure);
  averager_.average_parameters(optimizer_);
  return loss;
}

NamedTensors PostLocalSgdOptimizer::state_dict() const {
  NamedTensors state = optimizer_.state_dict();
  state.emplace_back(kStep, Tensor::scalar(averager_.step(), DType::kI64));
  return state;
}

void PostLocalSgdOptimizer::load_state_dict(const NamedTensors& state) {
  NamedTensors of_optimizer = state;
  std::optional<int64_t> step;
  std::erase_if(of_optimizer, [&](const auto& entry) {
    if (entry.first != kStep) return false;
    step = entry.second.template item<int64_t>();
    return true;
  });
  optimizer_.load_state_dict(of_optimizer);
  if (!step) log_warning("[PostLocalSgdOptimizer] the state has no step of an averager, which starts over from 0");
  averager_.set_step(step.value_or(0));
}

}  // namespace chorale::parallel
