#include "chorale/comm/flight.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "chorale/base/error.h"
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

TEST_F(Flights, ThatCannotBeWrittenAreNoError) {
  setenv("CHORALE_FLIGHT_DIR", (folder_ / "nowhere").c_str(), 1);
  EXPECT_EQ(std::make_unique<FlightRecorder>()->dump(membership_, ""), "");
}

}  // namespace
}  // namespace chorale::comm
