#include "chorale/comm/flight.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "chorale/base/error.h"
#include "chorale/comm/flight_file.h"
#include "chorale/testing/environment_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::comm {
namespace {

namespace fs = std::filesystem;

class Flights : public testing::Test {
 public:
  Flights() { setenv("CHORALE_FLIGHT_DIR", folder_.path().c_str(), 1); }
  ~Flights() override { unsetenv("CHORALE_FLIGHT_DIR"); }

 protected:
  TemporaryFolder folder_;
  Membership membership_{.name = "world", .rank = 0, .members = {0, 1}};
};

TEST_F(Flights, AreNotWrittenThroughLinksThatSomebodyPutThere) {
  folder_.write("victim", "mine");
  for (int count = 0; count < 1000; ++count) {
    fs::create_symlink(folder_ / "victim", folder_ / concat("chorale-flight-", getpid(), "-", count, "-rank0.json"));
  }
  const auto recorder = std::make_unique<FlightRecorder>();
  const fs::path path = recorder->dump(membership_, "an error");
  EXPECT_EQ(folder_.read("victim"), "mine");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(path))) << path;
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(Flights, HaveNamesOfTheirOwn) {
  const auto recorder = std::make_unique<FlightRecorder>();
  const std::string first = recorder->dump(membership_, ""), second = recorder->dump(membership_, "");
  EXPECT_NE(first, second);
  EXPECT_TRUE(first.starts_with((folder_ / concat("chorale-flight-", getpid(), "-")).string())) << first;
  EXPECT_TRUE(first.ends_with("-rank0.json")) << first;
}

TEST_F(Flights, AreBoundedForEachProcess) {
  std::vector<std::string> paths;
  for (size_t count = 0; count < kMostRecords + 5; ++count) paths.push_back(write_flight(0, "text"));
  size_t there = 0;
  for (const auto& entry : fs::directory_iterator(folder_.path())) there += entry.is_regular_file();
  EXPECT_EQ(there, kMostRecords);
  EXPECT_FALSE(fs::exists(paths[4]));
  EXPECT_TRUE(fs::exists(paths[5]));
}

// Tests that run without CHORALE_FLIGHT_DIR (Note [Records of a job]). A process has one job, whose name may be given.
class JobFlights : public Flights {
 public:
  JobFlights() {
    unsetenv("CHORALE_FLIGHT_DIR");
    name_job("abc");
    job_ = fs::path(write_flight(0, "x")).parent_path();
    tidy_flights(0);
  }

 protected:
  const EnvironmentVariable temporary_{"TMPDIR", folder_.path().c_str()};
  fs::path job_;
};

TEST_F(JobFlights, AreInOneFolderOfTheirJobThatNobodyElseCanRead) {
  EXPECT_EQ(job_.parent_path(), folder_.path());
  EXPECT_TRUE(job_.filename().string().starts_with("chorale-flights-")) << job_;
  name_job("def");  // it has a name
  EXPECT_EQ(fs::path(write_flight(0, "x")).parent_path(), job_);
  EXPECT_EQ(fs::path(write_flight(1, "x")).parent_path(), job_);
  EXPECT_EQ(fs::status(job_).permissions(), fs::perms::owner_all);
}

TEST_F(JobFlights, AreNotWrittenToAFolderThatOthersCanReadOrToALink) {
  fs::create_directory(job_);
  fs::permissions(job_, fs::perms::owner_all | fs::perms::others_read);
  EXPECT_EQ(write_flight(0, "x"), "");
  fs::remove(job_);
  fs::create_directory(folder_ / "elsewhere");
  fs::permissions(folder_ / "elsewhere", fs::perms::owner_all);
  fs::create_symlink(folder_ / "elsewhere", job_);
  EXPECT_EQ(write_flight(0, "x"), "");
  EXPECT_TRUE(fs::is_empty(folder_ / "elsewhere"));
}

TEST_F(JobFlights, GoWithAProcessThatEndsWellAndStayOtherwise) {
  write_flight(0, "x");
  write_flight(0, "y");
  tidy_flights(3);
  EXPECT_EQ(std::distance(fs::directory_iterator(job_), {}), 2);
  folder_.write((job_.filename() / "another rank").string(), "z");
  tidy_flights(0);
  EXPECT_EQ(std::distance(fs::directory_iterator(job_), {}), 1) << "another rank's stays";
  fs::remove(job_ / "another rank");
  write_flight(0, "x");
  tidy_flights(0);
  EXPECT_FALSE(fs::exists(job_));
}

TEST_F(Flights, ThatCannotBeWrittenAreNoError) {
  setenv("CHORALE_FLIGHT_DIR", (folder_ / "nowhere").c_str(), 1);
  EXPECT_EQ(std::make_unique<FlightRecorder>()->dump(membership_, ""), "");
}

}  // namespace
}  // namespace chorale::comm
