#include "chorale/trace/trace_summary.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "chorale/base/error.h"

namespace chorale::trace {
namespace {

using Interval = std::pair<Clock::time_point, Clock::time_point>;

// A set of moments: intervals that overlap count once.
class Moments {
 public:
  void add(const Event& event) { intervals_.emplace_back(event.start, event.end); }
  void add(const Moments& other) {
    intervals_.insert(intervals_.end(), other.intervals_.begin(), other.intervals_.end());
  }

  Clock::duration length() const {
    Clock::duration total{};
    for (const auto& [start, end] : merged()) total += end - start;
    return total;
  }
  Clock::duration shared_with(const Moments& other) const {
    Moments both = *this;
    both.add(other);
    return length() + other.length() - both.length();
  }

 private:
  std::vector<Interval> merged() const {
    std::vector<Interval> sorted = intervals_, result;
    std::sort(sorted.begin(), sorted.end());
    for (const Interval& next : sorted) {
      if (result.empty() || next.first > result.back().second) {
        result.push_back(next);
      } else {
        result.back().second = std::max(result.back().second, next.second);
      }
    }
    return result;
  }

  std::vector<Interval> intervals_;
};

// What is known of a step so far.
struct Collected {
  Moments forward, backward, optimizer, buckets, comm;
  std::vector<const Event*> bucket_events;

  void add(const Event& event) {
    if (event.kind == Kind::kComm) {
      comm.add(event);
    } else if (event.kind == Kind::kBucket) {
      buckets.add(event);
      bucket_events.push_back(&event);
    } else if (event.kind == Kind::kSpan) {
      if (event.name == "forward") forward.add(event);
      if (event.name == "backward") backward.add(event);
      if (event.name == "optimizer") optimizer.add(event);
    }
  }

  StepTimes times(int rank, int64_t step) const {
    StepTimes result{.rank = rank,
                     .step = step,
                     .forward = forward.length(),
                     .backward = backward.length(),
                     .optimizer = optimizer.length()};
    for (const Event* event : bucket_events) result.buckets.emplace_back(event->name, event->end - event->start);
    Moments computing = forward, communicating = buckets;
    computing.add(backward);
    computing.add(optimizer);
    communicating.add(comm);
    result.compute = computing.length() - computing.shared_with(comm);
    result.communication = communicating.length();
    result.exposed = comm.length();
    return result;
  }
};

std::string ms(Clock::duration time) {
  char text[32];
  const double value = std::chrono::duration<double, std::milli>(time).count();
  // Three digits that matter, for microseconds and minutes alike.
  std::snprintf(text, sizeof(text), "%.*f", value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3, value);
  return text;
}

}  // namespace

double StepTimes::hidden_share() const {
  return communication.count() > 0 ? static_cast<double>(hidden().count()) / static_cast<double>(communication.count())
                                   : 0;
}

std::vector<StepTimes> step_times(const std::vector<Event>& events) {
  std::map<int, std::vector<const Event*>> by_rank;
  for (const Event& event : events) by_rank[event.rank].push_back(&event);
  std::vector<StepTimes> all;
  for (auto& [rank, own] : by_rank) {
    std::stable_sort(own.begin(), own.end(), [](const Event* a, const Event* b) { return a->start < b->start; });
    Collected step;
    int64_t number = 0;
    Clock::time_point optimizer_end = Clock::time_point::max();
    const auto close = [&, rank = rank] {
      if (optimizer_end == Clock::time_point::max()) return;
      all.push_back(step.times(rank, number++));
      step = {};
      optimizer_end = Clock::time_point::max();
    };
    for (const Event* event : own) {
      if (event->start >= optimizer_end) close();
      step.add(*event);
      if (event->kind == Kind::kSpan && event->name == "optimizer") optimizer_end = event->end;
    }
    close();
  }
  return all;
}

std::string describe(const StepTimes& step) {
  std::string text = concat("rank ", step.rank, ", step ", step.step, ": forward ", ms(step.forward), " ms, backward ",
                            ms(step.backward), " ms");
  for (const auto& [name, time] : step.buckets) text += concat(", ", name, " ", ms(time), " ms");
  return concat(text, ", optimizer ", ms(step.optimizer), " ms");
}

std::string summary(const std::vector<StepTimes>& steps) {
  StepTimes mean;
  const auto count = static_cast<int64_t>(std::max<size_t>(steps.size(), 1));
  for (const StepTimes& step : steps) {
    mean.compute += step.compute;
    mean.communication += step.communication;
    mean.exposed += step.exposed;
  }
  return concat("compute ", ms(mean.compute / count), " ms, communication ", ms(mean.communication / count), " ms (",
                ms(mean.exposed / count), " exposed, ", ms(mean.hidden() / count), " hidden), ",
                std::lround(mean.hidden_share() * 100), " % hidden");
}

}  // namespace chorale::trace
