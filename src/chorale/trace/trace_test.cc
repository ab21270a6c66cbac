#include "chorale/trace/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/json/json.h"
#include "chorale/trace/trace_merge.h"

namespace chorale {
namespace {

TEST(Trace, KeepsTheLastEventsInOrderAndNothingWhenOff) {
  trace::record({.name = "before", .rank = 0, .start = {}, .end = {}, .async = false, .shapes = {}});
  trace::start(2);
  for (const char* name : {"a", "b", "c"}) {
    trace::record({.name = name, .rank = 1, .start = {}, .end = {}, .async = true, .shapes = {{2, 3}}});
  }
  const auto events = trace::stop();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, "b");
  EXPECT_EQ(events[1].name, "c");
  EXPECT_NE(trace::chrome_json(events).find("[[2,3]]"), std::string::npos);
  trace::record({.name = "after", .rank = 0, .start = {}, .end = {}, .async = false, .shapes = {}});
  EXPECT_TRUE(trace::stop().empty());
}

TEST(Trace, ATimelineHasAProcessPerRankAndCommunicationOnTracksOfItsOwn) {
  const auto at = [](int us) { return trace::Clock::time_point(std::chrono::microseconds(us)); };
  const auto event = [&](const char* name, int rank, int start, int end, trace::Kind kind) {
    return trace::Event{.name = name, .rank = rank, .start = at(start), .end = at(end), .kind = kind};
  };
  using enum trace::Kind;
  // The two buckets overlap; the third begins when the first is over.
  const std::string first = trace::chrome_json(
      {event("backward", 0, 0, 90, kSpan), event("wait", 0, 60, 80, kComm), event("bucket 0", 0, 10, 50, kBucket),
       event("bucket 1", 0, 30, 80, kBucket), event("bucket 2", 0, 50, 70, kBucket)});
  const std::string second = trace::chrome_json({event("backward", 1, 5, 95, kSpan)});
  const json::Value merged = json::parse("timeline", trace::merged_chrome_json({first, second}));
  const auto member = [](const json::Value& row, std::string_view key) -> const json::Value& {
    return *json::find(row.object(key), key);
  };
  std::map<std::string, std::pair<int64_t, int64_t>> places;
  std::set<std::string> processes;
  for (const json::Value& row : member(merged, "traceEvents").array("traceEvents")) {
    const std::string name = member(row, "name").string("name");
    if (name == "process_name") processes.insert(member(member(row, "args"), "name").string("name"));
    if (member(row, "ph").string("ph") != "X") continue;
    const int64_t rank = member(row, "pid").size("pid");
    places[name + " of " + std::to_string(rank)] = {rank, member(row, "tid").size("tid")};
  }
  EXPECT_EQ(processes, (std::set<std::string>{"rank 0", "rank 1"}));
  const std::map<std::string, std::pair<int64_t, int64_t>> expected = {
      {"backward of 0", {0, 0}}, {"wait of 0", {0, 1}},     {"bucket 0 of 0", {0, 2}},
      {"bucket 1 of 0", {0, 3}}, {"bucket 2 of 0", {0, 2}}, {"backward of 1", {1, 0}}};
  EXPECT_EQ(places, expected);
  EXPECT_THROW(trace::merged_chrome_json({first, "[]"}), InvalidArgument);
}

TEST(DebugLevel, IsParsedInAnyCaseAndSetAtRunTime) {
  EXPECT_EQ(debug_level_from_name("detail"), DebugLevel::kDetail);
  EXPECT_THROW(debug_level_from_name("loud"), InvalidArgument);
  const DebugLevel before = debug_level();
  set_debug_level(DebugLevel::kInfo);
  EXPECT_EQ(debug_level(), DebugLevel::kInfo);
  set_debug_level(before);
}

}  // namespace
}  // namespace chorale
