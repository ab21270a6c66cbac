#include "chorale/base/trace.h"

#include <gtest/gtest.h>

#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"

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
