#include "chorale/launch/council.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <set>

#include "chorale/base/error.h"
#include "chorale/launch/line_test_util.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using transport::Epoch;
using transport::EpochNode;

constexpr auto kSoon = 20s;

// Launchers of nodes that have two ranks each, in one process, with cables between them.
class Launchers {
 public:
  explicit Launchers(int nodes, ElasticLimits limits = {1, 64}, std::chrono::milliseconds keep_alive = 400ms)
      : limits_(limits), keep_alive_(keep_alive) {
    stores_.reserve(8);  // threads read it while a node is added
    first_.number = 1;
    first_.cause = "start";
    first_.founders = 2 * nodes;
    for (int node = 0; node < nodes; ++node) {
      stores_.push_back(std::make_shared<transport::MemoryStore>());
      first_.nodes.push_back({node, std::to_string(node)});
      first_.members.insert(first_.members.end(), {2 * node, 2 * node + 1});
    }
    for (int node = 0; node < nodes; ++node) start(node, first_, {2 * node, 2 * node + 1});
  }

  void start(int node, const Epoch& epoch, std::vector<int> members) {
    if (static_cast<size_t>(node) == stores_.size()) stores_.push_back(std::make_shared<transport::MemoryStore>());
    NodeFacts& facts = facts_[node];
    facts.node = {node, std::to_string(node)};
    facts.members = std::move(members);
    facts.used = true;
    councils_[node] = std::make_unique<Council>(Council::Plan{
        .node = node,
        .epoch = epoch,
        .own = stores_[static_cast<size_t>(node)],
        .connect = [this, node](const std::string& place, Deadline deadline) -> std::shared_ptr<transport::Store> {
          const int to = std::stoi(place);
          auto line = std::make_shared<Line>(stores_[static_cast<size_t>(to)], cable(node, to));
          line->contains("anything", deadline);
          return line;
        },
        .keep_alive = keep_alive_,
        .successor = {.limits = limits_, .patience = 1s}});
    councils_[node]->tell(facts);
  }
  void end(int node) { councils_.erase(node); }
  Council& at(int node) { return *councils_.at(node); }
  NodeFacts& facts(int node) { return facts_.at(node); }
  void tell(int node) { at(node).tell(facts(node)); }
  void lose_rank(int member, const std::string& cause) {
    NodeFacts& own = facts(member / 2);
    std::erase(own.members, member);
    own.cause = cause;
    tell(member / 2);
  }

  // Both ways.
  void cut(int a, int b, Cable how) {
    cable(a, b)->store(how);
    cable(b, a)->store(how);
  }
  void isolate(int node, Cable how) {
    for (const auto& [other, council] : councils_) {
      if (other != node) cut(node, other, how);
    }
  }

  // The next epoch that this node states.
  Epoch next(int node) {
    for (const Deadline patience = within(kSoon); !patience.passed(); std::this_thread::sleep_for(1ms)) {
      if (auto epoch = at(node).news()) {
        facts(node).cause.clear();
        tell(node);
        return *epoch;
      }
      if (const auto why = at(node).problem()) {
        ADD_FAILURE() << "node " << node << " ended: " << *why;
        return {};
      }
    }
    ADD_FAILURE() << "node " << node << " heard of no epoch";
    return {};
  }
  std::string end_of(int node) {
    for (const Deadline patience = within(kSoon); !patience.passed(); std::this_thread::sleep_for(1ms)) {
      if (const auto why = at(node).problem()) return *why;
      if (const auto why = at(node).halted()) return *why;
    }
    return "node goes on";
  }
  const Epoch& first() const { return first_; }

 private:
  std::shared_ptr<std::atomic<Cable>> cable(int a, int b) {
    const std::lock_guard lock(mutex_);
    auto& found = cables_[{a, b}];
    if (!found) found = std::make_shared<std::atomic<Cable>>(Cable::kFine);
    return found;
  }

  const ElasticLimits limits_;
  const std::chrono::milliseconds keep_alive_;
  Epoch first_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::shared_ptr<std::atomic<Cable>>> cables_;
  std::vector<std::shared_ptr<transport::Store>> stores_;
  std::map<int, NodeFacts> facts_;
  std::map<int, std::unique_ptr<Council>> councils_;
};

std::vector<int> numbers_of(const Epoch& epoch) {
  std::vector<int> numbers;
  for (const EpochNode& node : epoch.nodes) numbers.push_back(node.number);
  return numbers;
}

TEST(Council, ADeathOnAnyNodeIsStatedOnAll) {
  Launchers nodes(3);
  nodes.lose_rank(3, "rank 3 died");
  for (const int node : {0, 1, 2}) {
    const Epoch epoch = nodes.next(node);
    EXPECT_EQ(epoch.number, 2);
    EXPECT_THAT(epoch.members, ElementsAre(0, 1, 2, 4, 5));
    EXPECT_EQ(epoch.cause, "rank 3 died");
    EXPECT_EQ(numbers_of(epoch), (std::vector<int>{0, 1, 2}));
  }
  // A replacement, and a death on the node with the store.
  nodes.facts(1).members.push_back(100);
  nodes.tell(1);
  for (const int node : {0, 1, 2}) EXPECT_THAT(nodes.next(node).members, ElementsAre(0, 1, 2, 4, 5, 100));
  nodes.lose_rank(0, "rank 0 died");
  for (const int node : {0, 1, 2}) EXPECT_THAT(nodes.next(node).members, ElementsAre(1, 2, 4, 5, 100));
}

TEST(Council, ThreeNodesGoOnWithoutThatOfTheStore) {
  Launchers nodes(3);
  nodes.isolate(0, Cable::kSilent);
  for (const int node : {1, 2}) {
    const Epoch epoch = nodes.next(node);
    EXPECT_THAT(epoch.members, ElementsAre(2, 3, 4, 5));
    EXPECT_EQ(numbers_of(epoch), (std::vector<int>{1, 2}));
    EXPECT_THAT(epoch.cause, HasSubstr("lost node 0"));
  }
  EXPECT_THAT(nodes.end_of(0), HasSubstr("not enough of the 3 nodes are reached"));
  // The store is that of node 1 now, and it counts for two.
  nodes.isolate(2, Cable::kClosed);
  EXPECT_THAT(nodes.next(1).members, ElementsAre(2, 3));
  EXPECT_THAT(nodes.end_of(2), HasSubstr("not enough of the 2 nodes are reached"));
}

TEST(Council, TwoNodesEndWithThatOfTheStore) {
  Launchers nodes(2);
  nodes.cut(0, 1, Cable::kClosed);
  EXPECT_THAT(nodes.end_of(1), HasSubstr("lost node 0"));
  EXPECT_THAT(nodes.next(0).members, ElementsAre(0, 1));
}

// It could vote, but nobody asks it: what it hears later is that the others are gone.
TEST(Council, ANodeThatComesBackLearnsThatItWasExcluded) {
  Launchers nodes(3);
  nodes.isolate(2, Cable::kSilent);
  EXPECT_THAT(nodes.next(0).members, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(nodes.next(1).members, ElementsAre(0, 1, 2, 3));
  nodes.isolate(2, Cable::kFine);
  EXPECT_THAT(nodes.end_of(2),
              testing::AnyOf(HasSubstr("was excluded from epoch 2"), HasSubstr("not enough of the 3")));
}

TEST(Council, ANodeJoinsAndIsAskedFromThenOn) {
  Launchers nodes(2);
  nodes.start(2, nodes.first(), {300, 301});
  for (const int node : {0, 1, 2}) {
    const Epoch epoch = nodes.next(node);
    EXPECT_THAT(epoch.members, ElementsAre(0, 1, 2, 3, 300, 301));
    EXPECT_EQ(numbers_of(epoch), (std::vector<int>{0, 1, 2}));
  }
  // Two of three are enough now.
  nodes.isolate(0, Cable::kClosed);
  EXPECT_THAT(nodes.next(1).members, ElementsAre(2, 3, 300, 301));
  EXPECT_THAT(nodes.next(2).members, ElementsAre(2, 3, 300, 301));
}

TEST(Council, TooFewRanksWaitAndThenEnd) {
  Launchers nodes(2, {4, 8});
  nodes.lose_rank(1, "rank 1 died");
  for (const Deadline patience = within(kSoon); !nodes.at(1).waits() && !patience.passed();)
    std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(nodes.at(1).waits());
  for (const int node : {0, 1}) EXPECT_THAT(nodes.end_of(node), HasSubstr("3 ranks are left, at least 4 are wanted"));
}

TEST(Council, WhatEndsOneNodeEndsAll) {
  Launchers nodes(3);
  nodes.at(2).halt("130 stopped by SIGINT");
  nodes.end(2);
  EXPECT_EQ(nodes.end_of(0), "130 stopped by SIGINT");
  EXPECT_EQ(nodes.end_of(1), "130 stopped by SIGINT");
}

TEST(Council, AllEndWhenAllAreFinished) {
  Launchers nodes(3);
  for (const int node : {0, 1, 2}) {
    EXPECT_FALSE(nodes.at(1).all_finished());
    nodes.facts(node).members.clear();
    nodes.facts(node).left = nodes.facts(node).done = nodes.facts(node).finished = true;
    nodes.tell(node);
  }
  for (const Deadline patience = within(kSoon); !patience.passed();) {
    bool all = true;
    for (const int node : {0, 1, 2}) all = all && nodes.at(node).all_finished() && nodes.at(node).is_done();
    if (all) return;
    std::this_thread::sleep_for(1ms);
  }
  FAIL() << "they do not end";
}

// Cables are pulled and put back, ranks die. All launchers that state an epoch state the same one, and as many go on as
// may.
TEST(Council, SeededPartitionsNeverSplitAJob) {
  const auto seeds = static_cast<uint64_t>(seeds_to_try(3, 200));
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    std::mt19937_64 random(seed);
    const int count = 3 + static_cast<int>(seed % 2);
    Launchers nodes(count, {1, 64}, 100ms);
    std::map<int64_t, std::set<std::string>> stated;
    std::map<int, Epoch> last;
    std::set<int> ended;
    const auto look = [&](Deadline until, bool until_settled) {
      for (; !until.passed(); std::this_thread::sleep_for(1ms)) {
        std::set<int64_t> numbers;
        for (int node = 0; node < count; ++node) {
          if (ended.contains(node)) continue;
          if (auto epoch = nodes.at(node).news()) {
            stated[epoch->number].insert(epoch->text());
            last[node] = *epoch;
          }
          if (nodes.at(node).problem() || nodes.at(node).halted()) {
            ended.insert(node);
            nodes.isolate(node, Cable::kClosed);  // its store ends with it
          } else {
            numbers.insert(last.contains(node) ? last[node].number : 1);
          }
        }
        if (until_settled && numbers.size() <= 1) return true;
      }
      return false;
    };
    for (int turn = 0; turn < 6; ++turn) {
      const int a = static_cast<int>(random() % static_cast<uint64_t>(count));
      const int b = static_cast<int>(random() % static_cast<uint64_t>(count));
      const auto how = static_cast<Cable>(random() % 3);
      if (random() % 4 == 0) {
        nodes.lose_rank(2 * a + static_cast<int>(random() % 2), concat("turn ", turn));
      } else if (random() % 2 == 0) {
        nodes.isolate(a, how);
      } else if (a != b) {
        nodes.cut(a, b, how);
      }
      look(within(std::chrono::milliseconds(random() % 300)), false);
    }
    for (int node = 0; node < count; ++node) nodes.isolate(node, Cable::kFine);
    for (const int node : ended) nodes.isolate(node, Cable::kClosed);
    EXPECT_TRUE(look(within(kSoon), true)) << "nodes that go on are in different epochs";
    for (const auto& [number, texts] : stated)
      EXPECT_EQ(texts.size(), 1U) << "epoch " << number << ": " << *texts.begin();
    for (const auto& [node, epoch] : last) EXPECT_TRUE(epoch.has_node(node));
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace chorale::launch
