#include "chorale/optim/scheduler.h"

#include <algorithm>
#include <cmath>

#include "chorale/optim/state_reader.h"

namespace chorale::optim {
namespace {

std::vector<double> rates(const Optimizer& optimizer) {
  std::vector<double> result;
  for (size_t g = 0; g < optimizer.group_count(); ++g) result.push_back(optimizer.lr(g));
  return result;
}

Tensor saved(double value) { return Tensor::scalar(value, DType::kF64); }
std::string rate_key(const char* what, size_t group) { return concat(what, "/", group); }

}  // namespace

Scheduler::Scheduler(Optimizer& optimizer, const Schedule& lr, Schedule momentum)
    : Scheduler(optimizer, std::vector<Schedule>(optimizer.group_count(), lr), std::move(momentum)) {}

Scheduler::Scheduler(Optimizer& optimizer, std::vector<Schedule> lr_of_groups, Schedule momentum)
    : optimizer_(optimizer), lr_(std::move(lr_of_groups)), momentum_(std::move(momentum)), base_(rates(optimizer)) {
  CHORALE_CHECK(lr_.size() == optimizer.group_count(), "[Scheduler] ", lr_.size(), " schedules for ",
                optimizer.group_count(), " groups");
  CHORALE_CHECK(std::all_of(lr_.begin(), lr_.end(), [](const Schedule& s) { return static_cast<bool>(s); }),
                "[Scheduler] a schedule is empty");
  if (momentum_) {
    momentum_option_ = optimizer.has_option("momentum") ? "momentum" : "beta1";
    CHORALE_CHECK(optimizer.has_option(momentum_option_),
                  "[Scheduler] a schedule of momentum needs an optimizer with the option momentum or beta1");
  }
  apply();
}

Scheduler Scheduler::one_cycle(Optimizer& optimizer, const OneCycleOptions& options) {
  return {optimizer, one_cycle_lr(options), one_cycle_momentum(options)};
}

void Scheduler::step() {
  ++steps_;
  apply();
}

void Scheduler::apply() {
  for (size_t g = 0; g < lr_.size(); ++g) {
    optimizer_.set_lr(g, lr_[g](steps_, base_[g]));
    if (momentum_)
      optimizer_.set_option(g, momentum_option_, momentum_(steps_, optimizer_.option(g, momentum_option_)));
  }
}

std::vector<double> Scheduler::last_lr() const { return rates(optimizer_); }

NamedTensors Scheduler::state_dict() const {
  NamedTensors state{{"steps", Tensor::scalar(steps_, DType::kI64)}};
  for (size_t g = 0; g < base_.size(); ++g) state.emplace_back(rate_key("base", g), saved(base_[g]));
  return state;
}

void Scheduler::load_state_dict(const NamedTensors& state) {
  StateReader reader("Scheduler", state);
  const int64_t steps = reader.whole_number("steps");
  std::vector<double> base;
  for (size_t g = 0; g < base_.size(); ++g) base.push_back(reader.number(rate_key("base", g)));
  reader.finish();
  steps_ = steps;
  base_ = std::move(base);
  apply();
}

PlateauScheduler::PlateauScheduler(Optimizer& optimizer, const PlateauOptions& options)
    : optimizer_(optimizer), options_(options) {
  CHORALE_CHECK(options.factor < 1, "[PlateauScheduler] factor must be below 1, not ", options.factor);
  best_ = options.mode == PlateauMode::kMin ? std::numeric_limits<double>::infinity()
                                            : -std::numeric_limits<double>::infinity();
}

bool PlateauScheduler::better(double metric) const {
  const double sign = options_.mode == PlateauMode::kMin ? 1 : -1;
  const double bound = options_.threshold_mode == Threshold::kRelative ? best_ * (1 - sign * options_.threshold)
                                                                       : best_ - sign * options_.threshold;
  return sign * metric < sign * bound;
}

void PlateauScheduler::step(double metric) {
  if (better(metric)) {
    best_ = metric;
    bad_steps_ = 0;
  } else {
    ++bad_steps_;
  }
  if (cooling_ > 0) {
    --cooling_;
    bad_steps_ = 0;
  }
  if (bad_steps_ <= options_.patience) return;
  for (size_t g = 0; g < optimizer_.group_count(); ++g) {
    const double old = optimizer_.lr(g), reduced = std::max(old * options_.factor, options_.min_lr);
    if (old - reduced > options_.eps) optimizer_.set_lr(g, reduced);
  }
  cooling_ = options_.cooldown;
  bad_steps_ = 0;
}

std::vector<double> PlateauScheduler::last_lr() const { return rates(optimizer_); }

NamedTensors PlateauScheduler::state_dict() const {
  NamedTensors state{{"best", saved(best_)},
                     {"bad_steps", Tensor::scalar(bad_steps_, DType::kI64)},
                     {"cooling", Tensor::scalar(cooling_, DType::kI64)}};
  for (size_t g = 0; g < optimizer_.group_count(); ++g) state.emplace_back(rate_key("lr", g), saved(optimizer_.lr(g)));
  return state;
}

void PlateauScheduler::load_state_dict(const NamedTensors& state) {
  StateReader reader("PlateauScheduler", state);
  const double best = reader.number("best");
  const int64_t bad = reader.whole_number("bad_steps"), cooling = reader.whole_number("cooling");
  std::vector<double> lr;
  for (size_t g = 0; g < optimizer_.group_count(); ++g) lr.push_back(reader.number(rate_key("lr", g)));
  reader.finish();
  best_ = best;
  bad_steps_ = bad;
  cooling_ = cooling;
  for (size_t g = 0; g < lr.size(); ++g) optimizer_.set_lr(g, lr[g]);
}

}  // namespace chorale::optim
