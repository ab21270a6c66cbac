#include "chorale/train/timeline.h"

#include <algorithm>

#include "chorale/comm/objects.h"
#include "chorale/trace/trace_merge.h"

namespace chorale::train {
namespace {

// What to add to times of this process's clock to get those of the wall clock, which is the one that hosts share.
trace::Clock::duration to_wall_clock() {
  return std::chrono::duration_cast<trace::Clock::duration>(std::chrono::system_clock::now().time_since_epoch()) -
         trace::Clock::now().time_since_epoch();
}

}  // namespace

Timeline::Timeline(const comm::Group& group, int64_t done, int64_t steps)
    : group_(group), first_(done + 1 + std::clamp<int64_t>((steps - done - kSteps) / 2, 0, 10)), last_step_(steps) {}

void Timeline::begin(int64_t step) {
  if (covers(step)) trace::start();
}

std::optional<std::string> Timeline::end(int64_t step) {
  if (!covers(step)) return {};
  for (trace::Event& event : trace::stop()) {
    // Ranks may be threads of one process: each speaks for itself.
    if (event.rank == trace::rank()) events_.push_back(std::move(event));
  }
  if (covers(step + 1) && step < last_step_) return {};
  return gather();
}

std::optional<std::string> Timeline::gather() {
  std::vector<comm::Value> origin{int64_t{0}};
  // A second before the first step: no rank's times are negative then, which viewers drop.
  if (group_.rank() == 0 && !events_.empty())
    origin[0] = (events_.front().start.time_since_epoch() + to_wall_clock() - std::chrono::seconds(1)).count();
  comm::broadcast_object_list(group_, origin, 0);
  const auto shift = to_wall_clock() - trace::Clock::duration(origin[0].as<int64_t>());
  for (trace::Event& event : events_) {
    event.start += shift;
    event.end += shift;
  }
  std::vector<std::string> documents;
  for (const comm::Value& document : comm::gather_object(group_, trace::chrome_json(events_)))
    documents.push_back(document.as<std::string>());
  events_ = {};
  if (group_.rank() != 0) return {};
  return trace::merged_chrome_json(documents);
}

}  // namespace chorale::train
