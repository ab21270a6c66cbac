// Where the time of training steps went, from the events of a trace.
//
// A step of a rank ends with an "optimizer" span. Its communication is the time in which a bucket of gradients was
// under way or the rank's thread was busy with calls among ranks; what the thread itself spent on them (starting,
// moving and waiting) is exposed, the rest is hidden behind computing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "chorale/trace/trace.h"

namespace chorale::trace {

struct StepTimes {
  int rank = -1;
  int64_t step = 0;  // in the trace, from 0
  Clock::duration forward{}, backward{}, optimizer{};
  std::vector<std::pair<std::string, Clock::duration>> buckets{};
  Clock::duration compute{};  // forward, backward and optimizer without what of them was exposed communication
  Clock::duration communication{}, exposed{};

  Clock::duration hidden() const { return communication - exposed; }
  double hidden_share() const;  // of the communication, from 0 to 1; 0 where there was none
};

// The steps of all ranks in the trace, by rank, then by step.
std::vector<StepTimes> step_times(const std::vector<Event>& events);

// "rank 0, step 3: forward 1.20 ms, backward 2.31 ms, bucket 0 0.31 ms, optimizer 0.52 ms"
std::string describe(const StepTimes& step);
// "compute 3.93 ms, communication 0.71 ms (0.10 exposed, 0.61 hidden), 86 % hidden": the mean of the steps.
std::string summary(const std::vector<StepTimes>& steps);

}  // namespace chorale::trace
