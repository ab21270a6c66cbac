#include "chorale/launch/last_calls.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "chorale/testing/environment_test_util.h"
#include "chorale/transport/store/store_kinds_test_util.h"

namespace chorale::launch {
namespace {

TEST(LastCalls, TheLatestRecordOfEachRankCountsAndBrokenOnesAreLeftOut) {
  const transport::ScratchFolder folder;
  const auto write = [&](const std::string& name, const std::string& text, int age_s) {
    std::ofstream(folder.path(name)) << text;
    std::filesystem::last_write_time(folder.path(name),
                                     std::filesystem::file_time_type::clock::now() - std::chrono::seconds(age_s));
  };
  const auto record = [](const std::string& calls) {
    return R"({"format": "chorale-flight-1", "calls": [)" + calls + "]}";
  };
  const std::string done = R"({"number": 3, "call": "all_reduce of 8 f32", "state": "done"})";
  const std::string pending = R"({"number": 4, "call": "barrier", "state": "pending"})";
  write("chorale-flight-100-0-rank2.json", record(done), 20);
  const std::string behind = R"({"number": 5, "call": "broadcast", "state": "pending"})";
  write("chorale-flight-100-1-rank2.json", record(done + "," + pending + "," + behind), 10);
  write("chorale-flight-101-0-rank0.json", record(done), 10);
  write("chorale-flight-102-0-rank1.json", "{", 10);
  write("chorale-flight-103-0-rank3.json", record(""), 10);
  write("chorale-flight-999-0-rank0.json", record(pending), 1);  // of another job
  write("chorale-flight-x.json", record(pending), 1);
  const auto calls = last_calls(folder.path(""), {{100, 2}, {101, 0}, {102, 1}, {103, 3}});
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_EQ(calls[0].rank, 0);
  EXPECT_EQ(calls[0].text, "all_reduce of 8 f32, #3: done");
  EXPECT_EQ(calls[1].rank, 2);
  EXPECT_EQ(calls[1].text, "barrier, #4: pending");
  EXPECT_EQ(std::filesystem::path(calls[1].file).filename(), "chorale-flight-100-1-rank2.json");
}

TEST(LastCalls, AFolderThatIsNotThereHasNone) { EXPECT_TRUE(last_calls("/nonexistent", {{1, 0}}).empty()); }

// ---- the folder of a job's records

TEST(FlightFolder, IsMadeForAJobAndGoesWhenTheJobEndedWell) {
  const transport::ScratchFolder folder;
  const EnvironmentVariable temporary("TMPDIR", folder.path("").c_str()), none("CHORALE_FLIGHT_DIR", nullptr);
  std::string path;
  {
    const FlightFolder flights("");
    path = flights.path();
    EXPECT_TRUE(path.starts_with(folder.path("chorale-flights-"))) << path;
    std::ofstream(path + "/chorale-flight-100-0-rank0.json") << "{}";
    std::ofstream(path + "/chorale-flight-200-0-rank0.json") << "{}";  // of a rank before a restart
    flights.tidy({{100, 0}});
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(FlightFolder, StaysWithTheRecordsOfAJobThatFailed) {
  const transport::ScratchFolder folder;
  const EnvironmentVariable temporary("TMPDIR", folder.path("").c_str()), none("CHORALE_FLIGHT_DIR", nullptr);
  std::string file;
  {
    const FlightFolder flights("");
    file = flights.path() + "/chorale-flight-100-0-rank0.json";
    std::ofstream(file) << "{}";
  }
  EXPECT_TRUE(std::filesystem::exists(file));
}

TEST(FlightFolder, OfLogsKeepsWhatOtherJobsLeft) {
  const transport::ScratchFolder folder;
  const EnvironmentVariable none("CHORALE_FLIGHT_DIR", nullptr);
  std::ofstream(folder.path("chorale-flight-100-0-rank0.json")) << "{}";
  std::ofstream(folder.path("chorale-flight-200-0-rank0.json")) << "{}";
  std::ofstream(folder.path("rank_0.log")) << "text";
  FlightFolder(folder.path("")).tidy({{100, 0}});
  EXPECT_FALSE(std::filesystem::exists(folder.path("chorale-flight-100-0-rank0.json")));
  EXPECT_TRUE(std::filesystem::exists(folder.path("chorale-flight-200-0-rank0.json")));
  EXPECT_TRUE(std::filesystem::exists(folder.path("rank_0.log")));
}

TEST(FlightFolder, ThatTheUserNamedIsLeftAlone) {
  const transport::ScratchFolder folder;
  const EnvironmentVariable named("CHORALE_FLIGHT_DIR", folder.path("").c_str());
  std::ofstream(folder.path("chorale-flight-100-0-rank0.json")) << "{}";
  FlightFolder("logs").tidy({{100, 0}});
  EXPECT_TRUE(std::filesystem::exists(folder.path("chorale-flight-100-0-rank0.json")));
}

}  // namespace
}  // namespace chorale::launch
