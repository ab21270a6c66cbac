#include "chorale/app/flight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::app {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json record(int rank, const std::vector<std::string>& calls) {
  json rows = json::array();
  int64_t number = 0;
  for (const std::string& call : calls) rows.push_back({{"number", ++number}, {"call", call}, {"state", "done"}});
  return {{"format", "chorale-flight-1"}, {"group", "world"}, {"rank", rank},
          {"members", {0, 1, 2}},         {"error", ""},      {"calls", rows}};
}

TEST(Flight, FindsTheFirstCallInWhichRanksDiffer) {
  const std::string text = explain_flights({record(0, {"barrier", "all_reduce of 4 f32 (sum)", "barrier"}),
                                            record(1, {"barrier", "broadcast of 4 f32, root 0", "x"}),
                                            record(2, {"barrier", "all_reduce of 4 f32 (sum)", "barrier"})});
  EXPECT_THAT(text, HasSubstr("call #2 is the first in which ranks differ"));
  EXPECT_THAT(text, HasSubstr("ranks 0, 2: all_reduce of 4 f32 (sum)"));
  EXPECT_THAT(text, HasSubstr("rank 1: broadcast of 4 f32, root 0"));
}

TEST(Flight, FindsTheRankThatStayedBehind) {
  const std::string text = explain_flights({record(0, {"barrier", "barrier"}), record(1, {"barrier"})});
  EXPECT_THAT(text, HasSubstr("rank 1 never made call #2, barrier, which rank 0 made"));
  EXPECT_THAT(text, HasSubstr("no dump of rank 2"));
}

TEST(Flight, SaysSoWhenAllAgree) {
  const std::string text = explain_flights({record(0, {"barrier"}), record(1, {"barrier"})});
  EXPECT_THAT(text, HasSubstr("all made the same calls, up to #1"));
  EXPECT_THAT(text, HasSubstr("look at rank 2 first"));
  EXPECT_THROW(explain_flights({json{{"a", 1}}}), InvalidArgument);
}

TEST(Flight, SaysWhichCallsOfOtherWorkersWereNotAnswered) {
  const auto call = [](int64_t number, const char* function, const char* state) {
    return json{{"number", number}, {"kind", "call"}, {"to", 1},        {"function", function},
                {"bytes", 40},      {"state", state}, {"start_us", 1e6}};
  };
  const json made{{"format", "chorale-flight-1"},
                  {"group", "rpc"},
                  {"rank", 0},
                  {"members", {0, 1}},
                  {"names", {"trainer", "server"}},
                  {"now_us", 3.5e6},
                  {"error", "worker 'server' is gone"},
                  {"calls", json::array()},
                  {"remote_calls", {call(1, "fetch", "done"), call(2, "push", "failed"), call(3, "push", "pending")}}};
  const std::string text = explain_flights({made});
  EXPECT_THAT(text, HasSubstr("trainer made 3 calls lately, 1 failed, 1 were not answered:"));
  EXPECT_THAT(text, HasSubstr("#3 push on server, 40 bytes, for 2.500 s"));
  EXPECT_THAT(text, HasSubstr("it said: worker 'server' is gone"));
  json bad = made;
  bad["remote_calls"][0].erase("state");
  EXPECT_THROW(explain_flights({bad}), InvalidArgument);
}

}  // namespace
}  // namespace chorale::app
