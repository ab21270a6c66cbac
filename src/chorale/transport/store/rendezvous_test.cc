#include "chorale/transport/store/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <mutex>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/environment_test_util.h"
#include "chorale/transport/socket.h"
#include "chorale/transport/store/store_kinds_test_util.h"
#include "chorale/transport/store/store_server.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

class RendezvousTest : public testing::Test {
 protected:
  // Ranks as threads; each adds up what the others put into the store.
  static std::vector<RendezvousResult> meet(const std::string& url, int size, const std::optional<Secret>& secret) {
    std::vector<RendezvousResult> results(static_cast<size_t>(size));
    std::vector<std::thread> ranks;
    ranks.reserve(results.size());
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        auto& mine = results[static_cast<size_t>(rank)];
        mine = rendezvous(url, {.rank = rank, .world_size = size, .secret = secret, .timeout = 20s});
        mine.store->add("sum", rank, within(20s));
        if (mine.store->add("count", 1, within(20s)) == size) mine.store->set("all", "", within(20s));
        mine.store->wait(std::vector<std::string>{"all"}, within(20s));
        EXPECT_EQ(mine.store->get("sum", within(20s)), std::to_string(size * (size - 1) / 2));
      });
    }
    for (auto& rank : ranks) rank.join();
    return results;
  }
  static void expect_one_host(const std::vector<RendezvousResult>& results) {
    for (size_t rank = 0; rank < results.size(); ++rank) {
      EXPECT_EQ(results[rank].rank, static_cast<int>(rank));
      EXPECT_EQ(results[rank].world_size, static_cast<int>(results.size()));
      EXPECT_EQ(results[rank].local_rank, static_cast<int>(rank));
      EXPECT_EQ(results[rank].local_size, static_cast<int>(results.size()));
      EXPECT_EQ(results[rank].address, "127.0.0.1");
    }
  }
  // Rank 0's store waits for the others to leave.
  static void leave(std::vector<RendezvousResult>& results) {
    while (!results.empty()) results.pop_back();
  }
  static uint16_t free_port() { return endpoint_of(listen_at(Endpoint::tcp("127.0.0.1", 0))).port; }

  std::string error_of(const std::string& url, const RendezvousOptions& options = {}) {
    return message_of([&] { rendezvous(url, options); });
  }

  ScratchEnvironment environment_;
  ScratchFolder folder_;
  const Secret secret_ = Secret::generate();
};

// spec: test_get_rank
TEST_F(RendezvousTest, RanksMeetOverTcpWithASecretAndOverAUnixSocketWithout) {
  for (const int size : {1, 2, 5}) {
    for (const auto& secret : {std::optional<Secret>(secret_), std::optional<Secret>()}) {
      auto results = meet(concat("tcp://127.0.0.1:", free_port()), size, secret);
      expect_one_host(results);
      leave(results);
    }
  }
}

TEST_F(RendezvousTest, RanksMeetInAFileThatTheLastOneRemoves) {
  const std::string path = folder_.path("meet");
  auto results = meet("file://" + path, 3, std::nullopt);
  expect_one_host(results);
  EXPECT_TRUE(std::filesystem::exists(path));
  leave(results);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(RendezvousTest, RankAndSizeMayBeInTheUrl) {
  const auto result = rendezvous("file://" + folder_.path("meet") + "?rank=0&world_size=1");
  EXPECT_EQ(result.rank, 0);
  EXPECT_EQ(result.world_size, 1);
}

TEST_F(RendezvousTest, EnvTakesTorchrunsVariables) {
  environment_.set("RANK", "0");
  environment_.set("WORLD_SIZE", "1");
  environment_.set("MASTER_ADDR", "localhost");
  environment_.set("MASTER_PORT", std::to_string(free_port()));
  const auto result = rendezvous();
  EXPECT_EQ(result.rank, 0);
  EXPECT_EQ(result.world_size, 1);
  EXPECT_FALSE(result.secret);
}

TEST_F(RendezvousTest, EnvGoesToTheStoreOfTheLauncherWithEntriesOfItsOwnForEachStart) {
  const StoreServer server(Endpoint::tcp("127.0.0.1", 0), secret_);
  environment_.set("CHORALE_STORE", server.endpoint().text());
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}) {
    environment_.set(name, value);
  }
  for (const char* start : {"0", "1"}) {
    environment_.set("TORCHELASTIC_RESTART_COUNT", start);
    const auto result = rendezvous("env://", {.secret = secret_, .timeout = 5s});
    EXPECT_EQ(result.local_size, 2);
    EXPECT_EQ(result.store->add("n", 1, within(5s)), 1);
  }
}

TEST_F(RendezvousTest, ANewWorldBeginsWhenAllHaveLeftTheOneBefore) {
  const StoreServer server(Endpoint::tcp("127.0.0.1", 0), secret_);
  environment_.set("CHORALE_STORE", server.endpoint().text());
  const auto join = [&](int rank, int size) {
    return rendezvous("env://", {.rank = rank, .world_size = size, .secret = secret_, .timeout = 20s});
  };
  std::thread slow([&] {
    { const auto first = join(1, 2); }
    const auto second = join(0, 1);  // alone, under another number
    EXPECT_EQ(second.store->add("n", 1, within(5s)), 1);
  });
  {
    const auto first = join(0, 2);
    EXPECT_EQ(first.store->add("n", 1, within(5s)), 1);
    std::this_thread::sleep_for(50ms);  // the other one must wait for us
  }
  slow.join();
}

TEST_F(RendezvousTest, EachMissingVariableIsNamed) {
  const std::vector<std::pair<std::string, std::string>> variables{
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  for (const auto& [missing, unused] : variables) {
    for (const auto& [name, value] : variables) environment_.set(name, name == missing ? "" : value);
    EXPECT_THAT(error_of("env://"), HasSubstr(missing + " is not set")) << missing;
  }
}

TEST_F(RendezvousTest, OptionsWinOverVariables) {
  environment_.set("RANK", "7");
  environment_.set("WORLD_SIZE", "9");
  environment_.set("MASTER_ADDR", "127.0.0.1");
  environment_.set("MASTER_PORT", std::to_string(free_port()));
  const auto result = rendezvous("env://", {.rank = 0, .world_size = 1, .timeout = 5s});
  EXPECT_EQ(result.rank, 0);
  EXPECT_EQ(result.world_size, 1);
}

TEST_F(RendezvousTest, AUrlThatSaysTooLittleTooMuchOrNonsenseIsRefused) {
  EXPECT_THAT(error_of("tcp://127.0.0.1", {.rank = 0, .world_size = 1}), HasSubstr("HOST:PORT"));
  EXPECT_THAT(error_of("tcp://127.0.0.1:70000", {.rank = 0, .world_size = 1}), HasSubstr("up to 65535"));
  EXPECT_THAT(error_of("file://", {.rank = 0, .world_size = 1}), HasSubstr("absolute path"));
  EXPECT_THAT(error_of("file://relative", {.rank = 0, .world_size = 1}), HasSubstr("absolute path"));
  EXPECT_THAT(error_of("tcp://127.0.0.1:1"), HasSubstr("rank is not known"));
  EXPECT_THAT(error_of("tcp://127.0.0.1:1", {.rank = 0}), HasSubstr("world_size is not known"));
  EXPECT_THAT(error_of("tcp://127.0.0.1:1?rank=1&world_size=2", {.rank = 0}),
              AllOf(HasSubstr("given twice: 0 as an option, 1 in the URL")));
  EXPECT_THAT(error_of("tcp://127.0.0.1:1?rank=1&rank=1&world_size=2"), HasSubstr("given twice"));
  EXPECT_THAT(error_of("tcp://127.0.0.1:1?rank=x&world_size=2"), HasSubstr("'rank=x'"));
  EXPECT_THAT(error_of("tcp://127.0.0.1:1?size=2"), HasSubstr("'size=2'"));
  EXPECT_THAT(error_of("http://127.0.0.1:1", {.rank = 0, .world_size = 1}), HasSubstr("not 'http://'"));
  EXPECT_THAT(error_of("127.0.0.1:1"), HasSubstr("expected env://"));
  EXPECT_THAT(error_of("env://host", {.rank = 0, .world_size = 1}), HasSubstr("takes no place"));
  for (const auto& [rank, size] : std::vector<std::pair<int, int>>{{-1, 2}, {2, 2}, {0, 0}, {0, -1}}) {
    EXPECT_THAT(error_of("tcp://127.0.0.1:1", {.rank = rank, .world_size = size}),
                HasSubstr(concat("rank ", rank, " of ", size)));
  }
}

TEST_F(RendezvousTest, AnotherHostNeedsASecret) {
  EXPECT_THAT(error_of("tcp://192.0.2.1:29500", {.rank = 1, .world_size = 2}), HasSubstr("set CHORALE_SECRET_FILE"));
  for (const auto& [name, value] : std::map<std::string, std::string>{{"RANK", "0"},
                                                                      {"WORLD_SIZE", "4"},
                                                                      {"LOCAL_RANK", "0"},
                                                                      {"LOCAL_WORLD_SIZE", "2"},
                                                                      {"MASTER_ADDR", "127.0.0.1"},
                                                                      {"MASTER_PORT", "29500"}}) {
    environment_.set(name, value);
  }
  EXPECT_THAT(error_of("env://"), AllOf(HasSubstr("2 of 4 ranks"), HasSubstr("set CHORALE_SECRET_FILE")));
}

TEST_F(RendezvousTest, OneRankTwiceOrTwoSizesAreNoticed) {
  const std::string url = "file://" + folder_.path("meet");
  // It waits for rank 0 in vain, and has introduced itself by then.
  EXPECT_THROW(rendezvous(url, {.rank = 1, .world_size = 2, .timeout = 100ms}), CommError);
  EXPECT_THAT(error_of(url, {.rank = 1, .world_size = 2}),
              AllOf(HasSubstr("rank 1 is there already"), HasSubstr(concat("process ", getpid()))));
  EXPECT_THAT(error_of(url, {.rank = 0, .world_size = 3}),
              AllOf(HasSubstr("world of 3"), HasSubstr("another one of 2")));
}

// What a rank of tests/run_test.py and tests/nodes_test.py does: only a launcher can run it.
TEST(RankOfALauncher, DISABLED_MeetsTheOthers) {
  const RendezvousResult job = rendezvous("env://", {.timeout = 20s});
  const auto key = [](int rank) { return concat("address ", rank); };
  job.store->set(key(job.rank), concat(job.address, " ", job.local_rank, " of ", job.local_size), within(20s));
  std::string line = concat("rank ", job.rank, " of ", job.world_size, ":");
  for (int rank = 0; rank < job.world_size; ++rank) line += " | " + job.store->get(key(rank), within(20s));
  std::cout << line << std::endl;
  // The store may be a rank's own.
  if (job.store->add("done", 1, within(20s)) == job.world_size) job.store->set("all done", "", within(20s));
  job.store->wait(std::vector<std::string>{"all done"}, within(20s));
}

}  // namespace
}  // namespace chorale::transport
