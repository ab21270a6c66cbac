#include "chorale/launch/epochs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

struct Node {
  explicit Node(ElasticLimits limits, int ranks, std::chrono::milliseconds patience = 60s,
                std::chrono::milliseconds time_to_end = 10s)
      : epochs({.limits = limits,
                .ranks = ranks,
                .store = store,
                .board = board,
                .say = [this](const std::string& line) { said.push_back(line); },
                .patience = patience,
                .time_to_end = time_to_end}) {}
  void set(const std::string& key) const { store->set(key, "", within(1s)); }
  void ready(int member) const { set(transport::ready_key(member)); }
  // What the ranks read.
  transport::Epoch stated() const {
    return transport::Epoch::parse(store->get(transport::epoch_key(board->latest()), within(1s)));
  }

  std::shared_ptr<transport::Store> store = std::make_shared<transport::MemoryStore>();
  std::shared_ptr<transport::EpochBoard> board = transport::EpochBoard::create();
  std::vector<std::string> said;
  Epochs epochs;
};

TEST(ElasticLimits, AreTwoNumbers) {
  const ElasticLimits limits = ElasticLimits::parse("2:8");
  EXPECT_EQ(limits.least, 2);
  EXPECT_EQ(limits.most, 8);
  for (const char* text : {"", "2", ":", "2:", ":8", "0:2", "a:b", "2:8x", "-1:4", "2:99999999999", "2 :3"})
    EXPECT_THAT(message_of([&] { ElasticLimits::parse(text); }), HasSubstr("MIN:MAX")) << text;
  EXPECT_THAT(message_of([&] { ElasticLimits::parse("3:2"); }), HasSubstr("MIN is more than MAX"));
}

TEST(Epochs, AJobGrowsAndShrinksOnDemand) {
  Node node({1, 4}, 2);
  EXPECT_THAT(node.epochs.resize(3), HasSubstr("has not begun"));
  node.ready(0);
  EXPECT_THAT(node.epochs.resize(5), HasSubstr("5 ranks are not within 1:4"));
  EXPECT_THAT(node.epochs.resize(4), HasSubstr("resized from 2 to 4 ranks"));
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre(2, 3));
  EXPECT_EQ(node.epochs.started(2), 2);
  EXPECT_EQ(node.epochs.started(3), 3);
  node.ready(2);
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_THAT(node.stated().members, ElementsAre(0, 1, 2));
  EXPECT_THAT(node.stated().cause, HasSubstr("resized"));
  // Member 3 has not come yet, and 2 is the last rank.
  EXPECT_THAT(node.epochs.resize(2), HasSubstr("resized from 4 to 2 ranks"));
  EXPECT_THAT(node.epochs.superfluous(), ElementsAre(3));
  node.ready(3);
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_THAT(node.stated().members, ElementsAre(0, 1));
  node.epochs.ended(3, "died: killed by SIGKILL");
  node.epochs.ended(2, std::nullopt);
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_EQ(node.board->latest(), 3);
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre());  // nobody is replaced
  node.epochs.ended(1, "died");
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre(1));  // but the dead
}

TEST(Epochs, SurvivorsComeFirstAndReplacementsWhenTheyAreReady) {
  Node node({1, 4}, 3);
  EXPECT_THAT(node.stated().members, ElementsAre(0, 1, 2));
  node.ready(0);
  node.epochs.ended(0, "died: killed by SIGKILL");
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_THAT(node.stated().members, ElementsAre(1, 2));
  EXPECT_THAT(node.stated().cause, HasSubstr("rank 0 (member 0) died: killed by SIGKILL"));
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre(0));
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre());
  EXPECT_EQ(node.epochs.started(0), 3);
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_EQ(node.board->latest(), 2);  // it is not ready yet
  node.ready(3);
  node.epochs.ended(1, "died: exit code 1");
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_EQ(node.board->latest(), 3);
  EXPECT_THAT(node.stated().members, ElementsAre(2, 3));
}

TEST(Epochs, TooFewRanksWaitForMoreAndThenEnd) {
  Node node({2, 2}, 2, 0ms);
  node.ready(1);
  node.epochs.ended(0, "died: killed by SIGKILL");
  EXPECT_THAT(node.epochs.look().value_or(""), HasSubstr("1 ranks are left, at least 2 are wanted"));
  EXPECT_TRUE(node.board->is_waiting());

  Node patient({2, 2}, 2);
  patient.ready(1);
  patient.epochs.ended(0, "died: killed by SIGKILL");
  EXPECT_EQ(patient.epochs.look(), std::nullopt);
  EXPECT_TRUE(patient.board->is_waiting());
  EXPECT_EQ(patient.board->latest(), 1);
  patient.epochs.vacancies();
  patient.ready(patient.epochs.started(0));
  EXPECT_EQ(patient.epochs.look(), std::nullopt);
  EXPECT_FALSE(patient.board->is_waiting());
  EXPECT_THAT(patient.stated().members, ElementsAre(1, 2));
}

TEST(Epochs, AProgramThatCannotGoOnIsNotReplaced) {
  Node node({1, 2}, 2);
  node.epochs.ended(0, "died: exit code 1");
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre());
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_EQ(node.board->latest(), 1);
}

TEST(Epochs, ReplacementsThatAlwaysFailAreGivenUp) {
  Node node({1, 2}, 2);
  node.ready(1);
  node.epochs.ended(0, "died: exit code 1");
  for (int i = 0; i < 3; ++i) {
    ASSERT_THAT(node.epochs.vacancies(), ElementsAre(0)) << i;
    node.epochs.ended(node.epochs.started(0), "died: exit code 1");
    EXPECT_EQ(node.epochs.look(), std::nullopt);
  }
  EXPECT_THAT(node.epochs.vacancies(), ElementsAre());
  EXPECT_THAT(node.said, testing::Contains(HasSubstr("no more are started")));
}

TEST(Epochs, AtTheEndReplacementsAreNotNeeded) {
  Node node({1, 2}, 2);
  node.ready(0);
  node.epochs.ended(1, "died: exit code 1");
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  node.epochs.vacancies();
  const int late = node.epochs.started(1);
  EXPECT_THAT(node.epochs.superfluous(), ElementsAre());
  EXPECT_FALSE(node.epochs.has_taken_part(late));
  node.set(transport::kElasticDone);
  EXPECT_THAT(node.epochs.superfluous(), ElementsAre(late));
  // One that joined just before the end was needed for it.
  node.set(transport::joined_key(late));
  EXPECT_THAT(node.epochs.superfluous(), ElementsAre());
  EXPECT_TRUE(node.epochs.has_taken_part(late));
}

TEST(Epochs, WhoWasToldToLeaveDoesNotFailAJobThatIsDone) {
  Node node({1, 2}, 2);
  node.ready(0);
  node.epochs.resize(1);
  EXPECT_TRUE(node.epochs.is_leaving(1));
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  node.set(transport::kElasticDone);
  EXPECT_FALSE(node.epochs.has_taken_part(1));
  EXPECT_TRUE(node.epochs.has_taken_part(0));
}

TEST(Epochs, WhoIsToLeaveHasTimeFromTheMeetingOfTheOthersOn) {
  Node node({1, 2}, 2, 60s, 0s);
  node.ready(0);
  node.epochs.resize(1);
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_THAT(node.epochs.superfluous(), ElementsAre());  // the step before may be a long one
  node.set("in/2/report/0");
  EXPECT_THAT(node.epochs.superfluous(), ElementsAre(1));
}

TEST(Epochs, ASizeThatTheJobHasIsNoChange) {
  Node node({1, 2}, 2);
  node.ready(0);
  EXPECT_THAT(node.epochs.resize(2), HasSubstr("nothing to do"));
  EXPECT_EQ(node.epochs.resize(1), "resized from 2 to 1 ranks");
  EXPECT_EQ(node.epochs.look(), std::nullopt);
  EXPECT_EQ(node.stated().cause, "resized from 2 to 1 ranks");
}

TEST(Epochs, WhenAllThatHadTheStateAreGoneTheJobEnds) {
  Node node({1, 2}, 2);
  node.ready(0);
  node.epochs.ended(0, "died: exit code 1");
  node.epochs.ended(1, "died: exit code 2");
  EXPECT_THAT(node.epochs.look().value_or(""), HasSubstr("no rank is left that had the state of the job"));
}

}  // namespace
}  // namespace chorale::launch
