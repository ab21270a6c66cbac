#include "chorale/launch/ballots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/launch/line_test_util.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;

struct Voters {
  explicit Voters(int count) {
    stores.reserve(static_cast<size_t>(count));
    for (int node = 0; node < count; ++node) {
      stores.push_back(std::make_shared<transport::MemoryStore>());
      prepare_to_vote(*stores.back(), within(1s));
    }
  }
  std::vector<Voter> voters(const std::set<int>& reached) {
    std::vector<Voter> all;
    for (int node = 0; node < static_cast<int>(stores.size()); ++node)
      all.push_back({node, reached.contains(node) ? stores[static_cast<size_t>(node)].get() : nullptr, 1ms});
    return all;
  }
  Ballot ballot(int64_t number, int node, const std::set<int>& reached, int casting = 0, int64_t after = 0) {
    return {number, node, voters(reached), casting, after};
  }
  std::vector<std::shared_ptr<transport::Store>> stores;
};

TEST(Ballots, MoreThanHalfDecideOrHalfWithTheOneThatCountsTwice) {
  Voters three(3);
  EXPECT_FALSE(three.ballot(1, 0, {0}).ask());
  Ballot two_of_three = three.ballot(1, 1, {1, 2});
  EXPECT_TRUE(two_of_three.ask());
  EXPECT_THAT(two_of_three.promised(), ElementsAre(1, 2));
  EXPECT_TRUE(two_of_three.propose("x"));
  Voters four(4);
  EXPECT_FALSE(four.ballot(1, 1, {2, 3}).ask());
  EXPECT_TRUE(four.ballot(1, 3, {0, 3}).ask());
  EXPECT_TRUE(four.ballot(2, 1, {2, 3}, 3).ask());
  Voters two(2);
  EXPECT_TRUE(two.ballot(1, 0, {0}).ask());
  EXPECT_FALSE(two.ballot(1, 1, {1}).ask());
}

TEST(Ballots, WhatWasDecidedIsFoundByTheNext) {
  Voters nodes(3);
  Ballot first = nodes.ballot(5, 0, {0, 1});
  ASSERT_TRUE(first.ask());
  EXPECT_EQ(first.bound_to(), std::nullopt);
  ASSERT_TRUE(first.propose("without node 2"));
  // Its proposer is gone; another one has heard of nothing.
  Ballot second = nodes.ballot(5, 2, {1, 2});
  ASSERT_TRUE(second.ask());
  EXPECT_EQ(second.bound_to(), "without node 2");
  EXPECT_FALSE(first.propose("without node 2"));  // it is too late, though the value stands
  EXPECT_GT(first.highest(), 0);
  EXPECT_TRUE(second.propose("without node 2"));
}

TEST(Ballots, ALowerBallotIsRefusedAndLearnsAboveWhat) {
  Voters nodes(3);
  Ballot high = nodes.ballot(1, 0, {0, 1, 2}, 0, int64_t{5} << 16);
  ASSERT_TRUE(high.ask());
  Ballot low = nodes.ballot(1, 1, {0, 1, 2});
  EXPECT_FALSE(low.ask());
  Ballot next = nodes.ballot(1, 1, {0, 1, 2}, 0, low.highest());
  EXPECT_TRUE(next.ask());
  EXPECT_FALSE(high.propose("late"));
  EXPECT_TRUE(next.propose("in time"));
}

TEST(Ballots, AnEarlierDecisionIsPast) {
  Voters nodes(3);
  ASSERT_TRUE(nodes.ballot(2, 0, {0, 1}).ask());
  Ballot past = nodes.ballot(1, 2, {1, 2});
  EXPECT_FALSE(past.ask());
  EXPECT_TRUE(past.is_past());
  // The vote of a node that is behind is about nothing that matters any more.
  Ballot now = nodes.ballot(2, 1, {1, 2});
  EXPECT_TRUE(now.ask());
  EXPECT_EQ(now.bound_to(), std::nullopt);
}

// Nodes make ballots about one decision after the other, each with a value of its own; messages are lost, cables are
// pulled and put back, nodes give up halfway. Whatever they decide is the same.
TEST(Ballots, NobodyEverDecidesSomethingElse) {
  const auto seeds = static_cast<uint64_t>(seeds_to_try(300, 20000));
  int decided = 0, ballots = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    std::mt19937_64 random(seed);
    const int count = 2 + static_cast<int>(random() % 4);
    Voters nodes(count);
    std::vector<std::shared_ptr<std::atomic<Cable>>> cables;
    cables.reserve(static_cast<size_t>(count) * static_cast<size_t>(count));
    for (int i = 0; i < count * count; ++i) cables.push_back(std::make_shared<std::atomic<Cable>>(Cable::kFine));
    const int loss = static_cast<int>(random() % 3) * 8;
    std::mutex mutex;
    std::map<int64_t, std::set<std::string>> decisions;
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(count));
    for (int node = 0; node < count; ++node) {
      threads.emplace_back([&, node, own_seed = random()] {
        std::mt19937_64 own(own_seed);
        std::vector<std::unique_ptr<Line>> lines;
        std::vector<Voter> voters;
        for (int to = 0; to < count; ++to) {
          lines.push_back(std::make_unique<Line>(
              nodes.stores[static_cast<size_t>(to)],
              cables[static_cast<size_t>(node) * static_cast<size_t>(count) + static_cast<size_t>(to)], loss, own()));
          voters.push_back({to, lines.back().get(), 1ms});
        }
        int64_t after = 0;
        for (int64_t number = 1, tries = 0; number <= 2 && tries < 8; ++tries) {
          std::atomic<Cable>& cable = *cables[own() % cables.size()];
          cable = cable == Cable::kFine ? Cable::kClosed : Cable::kFine;
          Ballot ballot(number, node, voters, 0, after);
          const bool asked = ballot.ask();
          after = ballot.highest();
          const std::string value = ballot.bound_to().value_or(concat("node ", node, " try ", tries));
          const bool done = asked && own() % 8 != 0 && ballot.propose(value);
          const std::lock_guard lock(mutex);
          ++ballots;
          if (done) {
            decisions[number].insert(value);
            ++decided;
          }
          // The next decision begins when this one is known.
          if (!decisions[number].empty() && own() % 2 == 0) {
            ++number;
            after = 0;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& [number, values] : decisions)
      ASSERT_LE(values.size(), 1U) << "decision " << number << " of seed " << seed << ": " << *values.begin() << " and "
                                   << *values.rbegin();
  }
  EXPECT_GT(decided, ballots / 20);  // or nothing was tested
}

}  // namespace
}  // namespace chorale::launch
