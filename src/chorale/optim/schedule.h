// Schedules: functions of a step. A Scheduler (scheduler.h) sets what they say.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace chorale::optim {

// The learning rate at a step (from 0), given the one that the group started with. A pure function: schedules compose
// (chained), and going on from a checkpoint needs the number of the step only.
using Schedule = std::function<double(int64_t step, double base)>;

// base * gamma^k, where k grows by one every `period` steps.
Schedule step_decay(int64_t period, double gamma = 0.1);
// base * gamma^k, where k is the number of milestones reached; they increase.
Schedule multi_step(std::vector<int64_t> milestones, double gamma = 0.1);

struct LinearOptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1;
  int64_t steps = 5;
};
// Goes from base * start_factor to base * end_factor in a line, then stays constant.
Schedule linear(const LinearOptions& options = {});

struct CosineOptions {
  int64_t warmup_steps = 0;
  int64_t steps = 0;  // in all, with the warm-up
  double min_lr = 0;
  double start_factor = 0;  // of the warm-up, which is a line from base * start_factor to base
};
// A warm-up, then half a cosine from base to min_lr, then constant.
Schedule cosine(const CosineOptions& options);

// base * factor(step).
Schedule scaled_by(std::function<double(int64_t step)> factor);

// One after the other at each step: what one gives is the base of the next, so factors multiply.
Schedule chained(std::vector<Schedule> schedules);

enum class Anneal : uint8_t { kCosine, kLinear };
struct OneCycleOptions {
  double max_lr = 0;
  int64_t steps = 0;
  double rising = 0.3;  // the part of the steps in which the rate grows
  Anneal anneal = Anneal::kCosine;
  double start_divisor = 25;   // starts at max_lr / start_divisor,
  double final_divisor = 1e4;  // ends at that / final_divisor
  bool three_phases = false;   // fall to the start as fast as it rose, and only then to the end
  double base_momentum = 0.85;
  double max_momentum = 0.95;
};
// The rate rises to max_lr and falls far below where it began; a momentum does the opposite. They ignore the base.
// StateError for a step beyond the last.
Schedule one_cycle_lr(const OneCycleOptions& options);
Schedule one_cycle_momentum(const OneCycleOptions& options);

}  // namespace chorale::optim
