// Learning rates over time.
//
//   optim::Scheduler scheduler(optimizer, optim::cosine({.warmup_steps = 100, .steps = 10'000}));
//   for (…) {
//     …
//     optimizer.step();
//     scheduler.step();
//   }
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "chorale/optim/optimizer.h"
#include "chorale/optim/schedule.h"

namespace chorale::optim {

// Sets the learning rates of an optimizer, which must outlive it; step 0 is set on construction.
class Scheduler {
 public:
  // One schedule for all groups, or one for each. `momentum`, where given, moves the option momentum, or beta1 where
  // the optimizer has that instead.
  Scheduler(Optimizer& optimizer, const Schedule& lr, Schedule momentum = {});
  Scheduler(Optimizer& optimizer, std::vector<Schedule> lr_of_groups, Schedule momentum = {});
  // Both from one place.
  static Scheduler one_cycle(Optimizer& optimizer, const OneCycleOptions& options);

  // Called after optimizer.step().
  void step();
  int64_t steps() const { return steps_; }
  // The rate of each group now.
  std::vector<double> last_lr() const;

  NamedTensors state_dict() const;
  void load_state_dict(const NamedTensors& state);

 private:
  void apply();

  Optimizer& optimizer_;
  std::vector<Schedule> lr_;
  Schedule momentum_;
  const char* momentum_option_ = nullptr;
  std::vector<double> base_;
  int64_t steps_ = 0;
};

enum class PlateauMode : uint8_t { kMin, kMax };
enum class Threshold : uint8_t { kRelative, kAbsolute };
struct PlateauOptions {
  PlateauMode mode = PlateauMode::kMin;  // what is better
  double factor = 0.1;
  int64_t patience = 10;  // steps without improvement that are borne
  double threshold = 1e-4;
  Threshold threshold_mode = Threshold::kRelative;
  int64_t cooldown = 0;  // steps after a reduction in which nothing is counted
  double min_lr = 0;
  double eps = 1e-8;  // smaller changes of the rate are not made
};

// Multiplies learning rates by a factor when a metric stops improving.
class PlateauScheduler {
 public:
  explicit PlateauScheduler(Optimizer& optimizer, const PlateauOptions& options = {});

  void step(double metric);
  std::vector<double> last_lr() const;

  NamedTensors state_dict() const;
  void load_state_dict(const NamedTensors& state);

 private:
  bool better(double metric) const;

  Optimizer& optimizer_;
  PlateauOptions options_;
  double best_;
  int64_t bad_steps_ = 0;
  int64_t cooling_ = 0;
};

}  // namespace chorale::optim
