#include "chorale/transport/store/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <mutex>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/environment_test_util.h"
#include "chorale/transport/socket.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/store_kinds_test_util.h"
#include "chorale/transport/store/store_server.h"
#include "chorale/transport/store/tcp_store.h"

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
    return message_of<Error>([&] { rendezvous(url, options); });
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
           {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}) {
    environment_.set(name, value);
  }
  std::vector<RendezvousResult> starts;
  for (const char* start : {"0", "1"}) {
    environment_.set("TORCHELASTIC_RESTART_COUNT", start);
    starts.push_back(rendezvous("env://", {.secret = secret_, .timeout = 5s}));
    EXPECT_EQ(starts.back().local_size, 1);
    EXPECT_EQ(starts.back().store->add("n", 1, within(5s)), 1);
  }
}

// Twenty times in a row, at whatever is slowest: one rank is always ahead of the other.
TEST_F(RendezvousTest, RanksMeetAgainAndAgain) {
  const StoreServer server(Endpoint::tcp("127.0.0.1", 0), secret_);
  environment_.set("MASTER_ADDR", "127.0.0.1");
  environment_.set("MASTER_PORT", std::to_string(free_port()));
  struct Case {
    std::string url;
    std::optional<Secret> secret;
    std::string store = {};
  };
  for (const Case& at :
       {Case{"file://" + folder_.path("meet"), std::nullopt}, Case{concat("tcp://127.0.0.1:", free_port()), secret_},
        Case{concat("tcp://127.0.0.1:", free_port()), std::nullopt}, Case{"env://", secret_},
        Case{"env://", std::nullopt}, Case{"env://", secret_, server.endpoint().text()}}) {
    SCOPED_TRACE(concat(at.url, at.secret ? " with a secret" : "", " ", at.store));
    environment_.set("CHORALE_STORE", at.store);
    std::vector<std::thread> ranks;
    ranks.reserve(2);
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        for (int round = 0; round < 20; ++round) {
          const auto mine = rendezvous(at.url, {.rank = rank, .world_size = 2, .secret = at.secret, .timeout = 20s});
          mine.store->set(concat("of ", rank), concat(rank, " in ", round), within(20s));
          EXPECT_EQ(mine.store->get(concat("of ", 1 - rank), within(20s)), concat(1 - rank, " in ", round));
          if (rank == round % 2) std::this_thread::sleep_for(5ms);  // the other one has left and comes again
        }
      });
    }
    for (auto& rank : ranks) rank.join();
  }
  EXPECT_FALSE(std::filesystem::exists(folder_.path("meet")));
}

// A process that a rank has started, and that has its environment, does this: everybody has two worlds at the same
// time.
TEST_F(RendezvousTest, ASecondWorldBesideTheFirstMeetsAtItsStore) {
  const std::string url = concat("tcp://127.0.0.1:", free_port());
  auto first = meet(url, 2, secret_);
  auto second = meet(url, 2, secret_);
  first[0].store->set("of the first", "", within(5s));
  EXPECT_TRUE(first[1].store->contains("of the first", within(5s)));
  EXPECT_FALSE(second[1].store->contains("of the first", within(5s)));
  leave(second);
  leave(first);
}

TEST_F(RendezvousTest, EachMissingVariableIsNamed) {
  const std::vector<std::pair<std::string, std::string>> variables{
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  for (const auto& [missing, unused] : variables) {
    for (const auto& [name, value] : variables) environment_.set(name, name == missing ? "" : value);
    EXPECT_THAT(error_of("env://"), HasSubstr(missing + " is not set")) << missing;
  }
}

TEST_F(RendezvousTest, WithoutAnyVariableAProcessIsAWorldOfOne) {
  const auto alone = rendezvous("env://", {.timeout = 5s});
  EXPECT_EQ(alone.rank, 0);
  EXPECT_EQ(alone.world_size, 1);
  EXPECT_EQ(alone.local_size, 1);
  alone.store->set("key", "value", within(5s));
  EXPECT_EQ(alone.store->get("key", within(5s)), "value");
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
  std::thread waiting([&] {
    EXPECT_THROW(rendezvous(url, {.rank = 1, .world_size = 2, .timeout = 3s}), CommError);  // nobody comes
  });
  while (FileStore(folder_.path("meet")).count(within(5s)) < 3) std::this_thread::sleep_for(1ms);  // it has its seat
  EXPECT_THAT(error_of(url, {.rank = 1, .world_size = 2}),
              AllOf(HasSubstr("rank 1 is there already"), HasSubstr(concat("process ", getpid()))));
  EXPECT_THAT(error_of(url, {.rank = 0, .world_size = 3}),
              AllOf(HasSubstr("world of 3"), HasSubstr("another one of 2")));
  waiting.join();
}

TEST_F(RendezvousTest, RanksOfTwoRunsDoNotMix) {
  environment_.set("MASTER_ADDR", "127.0.0.1");
  environment_.set("MASTER_PORT", std::to_string(free_port()));
  environment_.set("RANK", "0");
  environment_.set("WORLD_SIZE", "2");
  environment_.set("TORCHELASTIC_RUN_ID", "monday");
  std::thread waiting([&] {
    EXPECT_THROW(rendezvous("env://", {.timeout = 3s}), CommError);  // nobody of its run comes
  });
  const Endpoint place = Endpoint::unix_socket(concat("chorale-", geteuid(), "-", *config::env("MASTER_PORT")));
  while (TcpStore(place, std::nullopt, within(5s)).count(within(5s)) < 3) std::this_thread::sleep_for(1ms);
  environment_.set("TORCHELASTIC_RUN_ID", "tuesday");
  EXPECT_THAT(error_of("env://", {.rank = 1, .timeout = 5s}), AllOf(HasSubstr("'monday'"), HasSubstr("'tuesday'")));
  waiting.join();
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
