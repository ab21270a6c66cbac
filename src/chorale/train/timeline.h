// trace.json of a run: a timeline of a few steps on all ranks, for chrome://tracing and Perfetto.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/trace/trace.h"

namespace chorale::train {

// All ranks of the group take part alike.
class Timeline {
 public:
  // The run has done `done` of `steps` steps. Three steps are recorded, once caches are warm.
  Timeline(const comm::Group& group, int64_t done, int64_t steps);

  // Called before and after step number `step`, counted from 1. end() returns the timeline on rank 0, once.
  void begin(int64_t step);
  std::optional<std::string> end(int64_t step);

 private:
  static constexpr int64_t kSteps = 3;
  bool covers(int64_t step) const { return step >= first_ && step < first_ + kSteps; }
  std::optional<std::string> gather();

  const comm::Group& group_;
  int64_t first_;
  int64_t last_step_;                 // of the run
  std::vector<trace::Event> events_;  // of this rank, so far
};

}  // namespace chorale::train
