#include "chorale/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "chorale/base/error.h"

namespace chorale::optim {
namespace {

// Goes from `from` to `to` as x goes from 0 to 1.
double between(Anneal anneal, double from, double to, double x) {
  if (anneal == Anneal::kLinear) return from + (to - from) * x;
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * x));
}

void check_steps(const char* schedule, int64_t steps) {
  CHORALE_CHECK(steps > 0, "[", schedule, "] the number of steps must be positive, not ", steps);
}

// A value that goes low → high → low → lowest (three phases) or low → high → lowest.
Schedule one_cycle(const OneCycleOptions& o, double low, double high, double lowest) {
  check_steps("one_cycle", o.steps);
  CHORALE_CHECK(o.rising >= 0 && o.rising <= 1, "[one_cycle] rising must be in [0, 1], not ", o.rising);
  const auto total = static_cast<double>(o.steps);
  struct Phase {
    double end, from, to;
  };
  std::vector<Phase> phases{{o.rising * total - 1, low, high}};
  if (o.three_phases) phases.push_back({2 * o.rising * total - 2, high, low});
  phases.push_back({total - 1, o.three_phases ? low : high, lowest});
  return [phases, anneal = o.anneal, steps = o.steps](int64_t step, double) {
    CHORALE_CHECK_STATE(step < steps, "[one_cycle] step ", step, " of a cycle of ", steps, " steps (from 0)");
    const auto at = static_cast<double>(step);
    double begin = 0;
    for (size_t i = 0;; begin = phases[i++].end) {
      const Phase& phase = phases[i];
      if (at > phase.end && i + 1 < phases.size()) continue;
      const double length = phase.end - begin;
      return between(anneal, phase.from, phase.to, length > 0 ? (at - begin) / length : 1);
    }
  };
}

}  // namespace

Schedule step_decay(int64_t period, double gamma) {
  check_steps("step_decay", period);
  return [=](int64_t step, double base) {
    const int64_t passed = step / period;
    return base * std::pow(gamma, static_cast<double>(passed));
  };
}

Schedule multi_step(std::vector<int64_t> milestones, double gamma) {
  CHORALE_CHECK(std::is_sorted(milestones.begin(), milestones.end()), "[multi_step] milestones must increase");
  return [milestones = std::move(milestones), gamma](int64_t step, double base) {
    const auto reached = std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin();
    return base * std::pow(gamma, static_cast<double>(reached));
  };
}

Schedule linear(const LinearOptions& o) {
  check_steps("linear", o.steps);
  return [o](int64_t step, double base) {
    const double part = static_cast<double>(std::min(step, o.steps)) / static_cast<double>(o.steps);
    return base * (o.start_factor + (o.end_factor - o.start_factor) * part);
  };
}

Schedule cosine(const CosineOptions& o) {
  check_steps("cosine", o.steps);
  CHORALE_CHECK(o.warmup_steps >= 0 && o.warmup_steps < o.steps, "[cosine] warmup_steps must be in [0, ", o.steps,
                "), not ", o.warmup_steps);
  return [o](int64_t step, double base) {
    if (step < o.warmup_steps) {
      const double part = static_cast<double>(step) / static_cast<double>(o.warmup_steps);
      return base * (o.start_factor + (1 - o.start_factor) * part);
    }
    const double part =
        static_cast<double>(std::min(step, o.steps) - o.warmup_steps) / static_cast<double>(o.steps - o.warmup_steps);
    return between(Anneal::kCosine, base, o.min_lr, part);
  };
}

Schedule scaled_by(std::function<double(int64_t step)> factor) {
  CHORALE_CHECK(factor, "[scaled_by] there is no function");
  return [factor = std::move(factor)](int64_t step, double base) { return base * factor(step); };
}

Schedule chained(std::vector<Schedule> schedules) {
  return [schedules = std::move(schedules)](int64_t step, double base) {
    for (const Schedule& schedule : schedules) base = schedule(step, base);
    return base;
  };
}

Schedule one_cycle_lr(const OneCycleOptions& o) {
  CHORALE_CHECK(o.max_lr > 0, "[one_cycle] max_lr must be positive, not ", o.max_lr);
  const double start = o.max_lr / o.start_divisor;
  return one_cycle(o, start, o.max_lr, start / o.final_divisor);
}

Schedule one_cycle_momentum(const OneCycleOptions& o) {
  return one_cycle(o, o.max_momentum, o.base_momentum, o.max_momentum);
}

}  // namespace chorale::optim
