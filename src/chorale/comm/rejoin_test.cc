// Groups that are made again at a store that has seen others before, and processes that join beside their parents.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <tuple>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/comm/progress_thread.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/world.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/environment_test_util.h"
#include "chorale/transport/store/store_kinds_test_util.h"
#include "chorale/transport/store/store_server.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using transport::Endpoint;

// A sum that nobody else computes: `what` tells this use of a group from all others.
void expect_own_sum(Group& group, int64_t what) {
  for (const int64_t count : {1, 5000}) {
    std::vector<int64_t> x(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = what + (group.rank() + 1) * (i + 1);
    group.all_reduce(std::span(x)).wait();
    const int64_t ranks = group.size() * (group.size() + 1) / 2;
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(x[static_cast<size_t>(i)], group.size() * what + ranks * (i + 1));
  }
}

TEST(Rejoin, AStoreOfAnyKindServesTwentyGroupsInARow) {
  for (const auto& kind : transport::store_kinds()) {
    SCOPED_TRACE(kind.name);
    const auto stores = kind.make();
    std::vector<std::thread> ranks;
    ranks.reserve(2);
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        World world;
        const std::shared_ptr<transport::Store> store = stores->client();
        for (int round = 0; round < 20; ++round) {
          world.init(store, rank, 2, {.timeout = 20s});
          expect_own_sum(world.group(), round * 1'000'000);
          world.destroy();
        }
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

uint16_t free_port() { return transport::endpoint_of(transport::listen_at(Endpoint::tcp("127.0.0.1", 0))).port; }

// Ranks as processes: their segments, arenas and lives are seen through /proc.
TEST(Rejoin, AWorldIsMadeAndDestroyedTwentyTimesWhereverItMeets) {
  const auto results = run_processes(2, [&](Group& group) {
    transport::ScratchEnvironment environment;
    std::vector<int64_t> port{free_port()};
    group.broadcast(std::span(port), 0).wait();
    environment.set("RANK", std::to_string(group.rank()));
    environment.set("WORLD_SIZE", "2");
    environment.set("MASTER_ADDR", "127.0.0.1");
    environment.set("MASTER_PORT", std::to_string(port[0]));
    const std::string path = concat("/tmp/chorale-rejoin-", getppid());  // gone with the last world
    for (const std::string& url : {std::string("env://"), concat("tcp://127.0.0.1:", port[0]), "file://" + path}) {
      World world;
      for (int round = 0; round < 20; ++round) {
        world.init(url, {}, {.timeout = 30s});
        expect_own_sum(world.group(), round * 1'000'000);
        world.destroy();
      }
    }
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

// What a child of a rank does in the next test.
TEST(ChildOfARank, DISABLED_JoinsFromTheSameEnvironment) {
  const int rank = std::stoi(config::env("RANK").value()), size = std::stoi(config::env("WORLD_SIZE").value());
  {
    World world;
    world.init("env://", {}, {.timeout = 60s});
    for (int i = 0; i < 5; ++i) expect_own_sum(world.group(), 1'000'000'000 + i);
  }
  const auto store = std::make_shared<transport::TcpStore>(Endpoint::parse(config::env("CHORALE_STORE").value()),
                                                           transport::Secret::from_environment(), within(30s));
  Group group = Group::connect(*store, "torch", rank, size, {.timeout = 60s});
  for (int i = 0; i < 5; ++i) expect_own_sum(group, 2'000'000'000 + i);
}

pid_t start_child() {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  unsetenv("CHORALE_TEST_RANK");
  const char* arguments[] = {"child", "--gtest_filter=ChildOfARank.*", "--gtest_also_run_disabled_tests",
                             "--gtest_brief=1", nullptr};
  execv("/proc/self/exe", const_cast<char**>(arguments));
  _exit(127);
}

// What the parents had left in the store gave the children wrong sums, and broke the parents' group.
TEST(Rejoin, ChildrenJoinFromTheEnvironmentOfRanksThatGoOn) {
  const transport::Secret secret = transport::Secret::generate();
  const transport::StoreServer server(Endpoint::tcp("127.0.0.1", 0), secret);
  transport::ScratchEnvironment environment;
  const int file = secret.to_descriptor();
  fcntl(file, F_SETFD, 0);
  if (!is_rank_process()) {
    environment.set("TEST_SECRET_FD", std::to_string(file));
    environment.set("TEST_STORE", server.endpoint().text());
  }
  const auto results = run_processes(2, [&](Group& outer) {
    environment.set("CHORALE_SECRET_FD", config::env("TEST_SECRET_FD").value());
    environment.set("CHORALE_STORE", config::env("TEST_STORE").value());
    environment.set("WORLD_SIZE", "2");
    environment.set("RANK", std::to_string(outer.rank()));
    const auto store = std::make_shared<transport::TcpStore>(Endpoint::parse(config::env("CHORALE_STORE").value()),
                                                             transport::Secret::from_environment(), within(30s));
    World world;
    world.init("env://", {}, {.timeout = 60s});
    Group direct = Group::connect(*store, "torch", outer.rank(), 2, {.timeout = 60s});
    for (int start = 0; start < 5; ++start) {
      const pid_t child = start_child();
      int status = -1;
      // The parents' groups work all the time; as often on one rank as on the other.
      for (int64_t done = 0, i = 0; done < 2; ++i) {
        expect_own_sum(world.group(), i);
        expect_own_sum(direct, i + 100'000);
        std::vector<int64_t> ended{status == -1 && waitpid(child, &status, WNOHANG) == 0 ? (status = -1, 0) : 1};
        outer.all_reduce(std::span(ended)).wait();
        done = ended[0];
      }
      EXPECT_EQ(status, 0) << "the child of rank " << outer.rank() << ", start " << start;
    }
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
  close(file);
}

// A child that has the parent's objects, but none of its threads: whatever it tries is an error of its own.
TEST(Rejoin, AForkedChildGetsErrorsAndItsParentsNoHarm) {
  const auto body = [](Group& group) {
    auto helper = std::make_unique<ProgressThread>(group.engine());
    std::vector<int64_t> mine{group.rank() + 1};
    const Tensor buffer = Tensor::empty({1000}, DType::kF32);
    Work started = group.rank() == 0 ? group.irecv(buffer, 1) : Work();
    expect_own_sum(group, 1);
    const pid_t child = fork();
    if (child == 0) {
      const auto text = [&](const std::function<void()>& call) { return message_of<StateError>(call); };
      const std::string who = concat("is a forked child of rank ", group.rank());
      bool well =
          text([&] { std::ignore = group.all_reduce(std::span(mine)); }).find("[all_reduce]") != std::string::npos;
      well = well && text([&] { std::ignore = group.barrier(); }).find(who) != std::string::npos;
      well = well && text([&] { group.send(buffer, 1 - group.rank()); }).find(who) != std::string::npos;
      well = well && text([&] { (void)group.duplicate(); }).find(who) != std::string::npos;
      if (group.rank() == 0) {
        well = well && text([&] { started.wait(); }).find(who) != std::string::npos;
        well = well && text([&] { (void)started.is_completed(); }).find(who) != std::string::npos;
      }
      started = Work();
      { const Group dropped = std::move(group); }
      helper.reset();
      _exit(well ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    expect_own_sum(group, 2);
    if (group.rank() == 1) group.send(buffer, 0);
    if (group.rank() == 0) started.wait();
    expect_own_sum(group, 3);
  };
  EXPECT_EQ(run_processes(2, body), (std::vector<int>{0, 0}));
}

// The same for what is behind World: its store, whose server may be this process's own.
TEST(Rejoin, AForkedChildLeavesTheParentsStoreAlone) {
  const auto results = run_processes(2, [](Group& group) {
    std::vector<int64_t> port{free_port()};
    group.broadcast(std::span(port), 0).wait();
    auto world = std::make_unique<World>();
    world->init(concat("tcp://127.0.0.1:", port[0]), {.rank = group.rank(), .world_size = 2}, {.timeout = 30s});
    const pid_t child = fork();
    if (child == 0) {
      const std::string text = message_of<StateError>([&] { world->store().set("a", "b", within(5s)); });
      world.reset();
      _exit(text.find("was forked") != std::string::npos ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    world->store().set(concat("after ", group.rank()), "x", within(5s));
    EXPECT_EQ(world->store().get(concat("after ", 1 - group.rank()), within(20s)), "x");
    expect_own_sum(world->group(), 4);
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace chorale::comm
