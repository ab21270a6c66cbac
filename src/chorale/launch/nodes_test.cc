#include "chorale/launch/nodes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

class NodesTest : public testing::Test {
 protected:
  std::unique_ptr<Nodes> node(int rank, int count, int ranks_here, int max_restarts = 0, int start = 0) {
    return std::make_unique<Nodes>(Nodes::Self{.count = count,
                                               .rank = rank,
                                               .ranks_here = ranks_here,
                                               .max_restarts = max_restarts,
                                               .address = "127.0.0.1",
                                               .run_id = concat("run", rank),
                                               .where = "the test"},
                                   store_, start);
  }
  // Each in a thread of its own, as they wait for each other.
  static std::vector<NodePlan> join(const std::vector<std::unique_ptr<Nodes>>& nodes) {
    std::vector<NodePlan> plans(nodes.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < nodes.size(); ++i) {
      threads.emplace_back([&, i] {
        plans[i] = nodes[i]->join(within(10s));
        nodes[i]->start_watching();
      });
    }
    for (auto& thread : threads) thread.join();
    return plans;
  }
  static void await(const Nodes& nodes) {
    pollfd wake{nodes.wake_up(), POLLIN, 0};
    ASSERT_EQ(poll(&wake, 1, 10000), 1);
  }

  std::shared_ptr<transport::Store> store_ = std::make_shared<transport::MemoryStore>();
};

TEST_F(NodesTest, RanksAreNumberedOverTheNodes) {
  std::vector<std::unique_ptr<Nodes>> nodes;
  for (const int rank : {0, 1, 2}) nodes.push_back(node(rank, 3, rank + 1));
  const auto plans = join(nodes);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plans[i].world_size, 6);
    EXPECT_EQ(plans[i].first_rank, (std::vector{0, 1, 3}[i]));
    EXPECT_EQ(plans[i].master_addr, "127.0.0.1");
    EXPECT_EQ(plans[i].master_port, plans[0].master_port);
    EXPECT_NE(plans[i].master_port, 0);
    EXPECT_EQ(plans[i].run_id, "run0");
  }
}

TEST_F(NodesTest, OneHaltReachesAllAndTheFirstCounts) {
  std::vector<std::unique_ptr<Nodes>> nodes;
  for (const int rank : {0, 1}) nodes.push_back(node(rank, 2, 1));
  join(nodes);
  nodes[1]->halt({"rank 1 failed: with words", 137, true});
  nodes[0]->halt({"later", 1, false});
  for (const auto& each : nodes) {
    await(*each);
    ASSERT_TRUE(each->halted());
    EXPECT_EQ(each->halted()->reason, "rank 1 failed: with words");
    EXPECT_EQ(each->halted()->exit_status, 137);
    EXPECT_TRUE(each->halted()->may_restart);
    EXPECT_FALSE(each->all_finished());
  }
}

TEST_F(NodesTest, AllAreFinishedWhenTheLastOneIs) {
  std::vector<std::unique_ptr<Nodes>> nodes;
  for (const int rank : {0, 1}) nodes.push_back(node(rank, 2, 1));
  join(nodes);
  nodes[0]->finish();
  std::this_thread::sleep_for(500ms);
  EXPECT_FALSE(nodes[0]->all_finished());
  nodes[1]->finish();
  for (const auto& each : nodes) {
    await(*each);
    EXPECT_TRUE(each->all_finished());
    EXPECT_FALSE(each->halted());
  }
}

TEST_F(NodesTest, AStartOfItsOwnKnowsNothingOfTheOneBefore) {
  for (const int start : {0, 1}) {
    std::vector<std::unique_ptr<Nodes>> nodes;
    for (const int rank : {0, 1}) nodes.push_back(node(rank, 2, 1, 1, start));
    join(nodes);
    EXPECT_FALSE(nodes[0]->halted());
    nodes[0]->halt({"again", 1, true});
  }
}

TEST_F(NodesTest, NodesThatWereStartedDifferentlyAreToldSo) {
  const auto first = node(0, 2, 1, 3), second = node(1, 2, 1, 4);
  std::thread other([&] { EXPECT_THROW(second->join(within(10s)), InvalidArgument); });
  try {
    first->join(within(10s));
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("--max-restarts 4"), HasSubstr("--max-restarts 3")));
  }
  other.join();
}

TEST_F(NodesTest, TheSameNumberTwiceIsNoticed) {
  const auto first = node(1, 2, 1), second = node(1, 2, 2);
  EXPECT_THROW(first->join(within(50ms)), CommError);  // node 0 does not come
  EXPECT_THROW(second->join(within(50ms)), InvalidArgument);
}

TEST_F(NodesTest, OneNodeNeedsNobody) {
  const auto alone = node(0, 1, 4);
  const NodePlan plan = alone->join(within(1s));
  alone->start_watching();
  EXPECT_EQ(plan.world_size, 4);
  alone->finish();
  await(*alone);
  EXPECT_TRUE(alone->all_finished());
}

}  // namespace
}  // namespace chorale::launch
