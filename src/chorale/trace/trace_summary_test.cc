#include "chorale/trace/trace_summary.h"

#include <gtest/gtest.h>

namespace chorale::trace {
namespace {

using std::chrono::milliseconds;

Event event(const char* name, int rank, int start_ms, int end_ms, Kind kind = Kind::kSpan) {
  const Clock::time_point zero{};
  return {.name = name,
          .rank = rank,
          .start = zero + milliseconds(start_ms),
          .end = zero + milliseconds(end_ms),
          .kind = kind};
}

// Backward from 10 to 30: bucket 0 is under way from 15 to 25, bucket 1 from 20 to 32. The thread spends 1 ms on
// starting each, and waits from 28 to 32.
std::vector<Event> one_step(int rank, int at) {
  return {event("forward", rank, at, at + 10),
          event("start", rank, at + 15, at + 16, Kind::kComm),
          event("bucket 0", rank, at + 15, at + 25, Kind::kBucket),
          event("start", rank, at + 20, at + 21, Kind::kComm),
          event("bucket 1", rank, at + 20, at + 32, Kind::kBucket),
          event("shm:wait", rank, at + 28, at + 32, Kind::kComm),
          event("shm:all_reduce", rank, at + 15, at + 90, Kind::kCall),
          event("backward", rank, at + 10, at + 32),
          event("optimizer", rank, at + 34, at + 40)};
}

TEST(TraceSummary, TellsHiddenFromExposedCommunication) {
  const std::vector<StepTimes> steps = step_times(one_step(0, 0));
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].forward, milliseconds(10));
  EXPECT_EQ(steps[0].backward, milliseconds(22));
  EXPECT_EQ(steps[0].optimizer, milliseconds(6));
  EXPECT_EQ(steps[0].communication, milliseconds(17));  // from 15 to 32: what overlaps counts once
  EXPECT_EQ(steps[0].exposed, milliseconds(6));
  EXPECT_EQ(steps[0].compute, milliseconds(32));
  EXPECT_DOUBLE_EQ(steps[0].hidden_share(), 11.0 / 17);
  EXPECT_EQ(describe(steps[0]),
            "rank 0, step 0: forward 10.0 ms, backward 22.0 ms, bucket 0 10.0 ms, bucket 1 12.0 ms, optimizer 6.00 ms");
  EXPECT_EQ(summary(steps), "compute 32.0 ms, communication 17.0 ms (6.00 exposed, 11.0 hidden), 65 % hidden");
}

TEST(TraceSummary, KeepsRanksAndStepsApartAndLeavesOutWhatHasNoEnd) {
  std::vector<Event> events;
  for (int at : {0, 100}) {
    for (int rank : {1, 0}) {
      for (const Event& e : one_step(rank, at)) events.push_back(e);
    }
  }
  events.push_back(event("forward", 1, 200, 210));
  const std::vector<StepTimes> steps = step_times(events);
  ASSERT_EQ(steps.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(steps[i].rank, i < 2 ? 0 : 1);
    EXPECT_EQ(steps[i].step, static_cast<int64_t>(i % 2));
    EXPECT_EQ(steps[i].communication, milliseconds(17));
  }
  EXPECT_EQ(summary({}), "compute 0.000 ms, communication 0.000 ms (0.000 exposed, 0.000 hidden), 0 % hidden");
}

TEST(TraceSummary, SpansRecordTheirThreadsRankAndCostNothingWhenOff) {
  { const Span ignored("before"); }
  start();
  set_rank(7);
  {
    Span outer("outer");
    outer.end();
    const Span other("other", Kind::kComm, 3);
  }
  set_rank(-1);
  const auto events = stop();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, "outer");
  EXPECT_EQ(events[0].rank, 7);
  EXPECT_EQ(events[1].rank, 3);
  EXPECT_EQ(events[1].kind, Kind::kComm);
  EXPECT_LE(events[0].start, events[0].end);
}

}  // namespace
}  // namespace chorale::trace
