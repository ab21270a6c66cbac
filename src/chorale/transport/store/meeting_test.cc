#include "chorale/transport/store/meeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/host_identity.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/memory_store.h"
#include "chorale/transport/store/store_kinds_test_util.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

MeetingPlan plan_for(int rank, int size, const std::string& run = "") { return {"here", "the test", rank, size, run}; }

class MeetingTest : public testing::TestWithParam<StoreKind> {
 protected:
  const std::unique_ptr<StoreFixture> stores_ = GetParam().make();
};
INSTANTIATE_TEST_SUITE_P(Stores, MeetingTest, testing::ValuesIn(store_kinds()),
                         [](const auto& kind) { return kind.param.name; });

TEST_P(MeetingTest, ManyMeetingsInARowNeverMix) {
  constexpr int kRounds = 20, kSize = 3;
  std::vector<std::vector<Meeting>> met(kSize, std::vector<Meeting>(kRounds));
  std::vector<std::thread> ranks;
  ranks.reserve(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto store = stores_->client();
      for (int round = 0; round < kRounds; ++round) {
        met[static_cast<size_t>(rank)][static_cast<size_t>(round)] =
            meet(*store, plan_for(rank, kSize), concat("rank ", rank, "\nround ", round), within(30s));
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  std::set<std::string> tokens;
  for (int round = 0; round < kRounds; ++round) {
    const Meeting& first = met[0][static_cast<size_t>(round)];
    EXPECT_EQ(first.token.size(), 32u);
    tokens.insert(first.token);
    for (int rank = 0; rank < kSize; ++rank) {
      const Meeting& same = met[static_cast<size_t>(rank)][static_cast<size_t>(round)];
      EXPECT_EQ(same.token, first.token);
      for (int other = 0; other < kSize; ++other)
        EXPECT_EQ(same.told[static_cast<size_t>(other)], concat("rank ", other, "\nround ", round));
    }
  }
  EXPECT_EQ(tokens.size(), static_cast<size_t>(kRounds));
}

TEST_P(MeetingTest, OneThatTimedOutAdmitsNobody) {
  const auto store = stores_->client();
  EXPECT_THAT(message_of<CommError>([&] { meet(*store, plan_for(0, 2), "early", within(100ms)); }),
              AllOf(HasSubstr("rank 1 of 2 in vain"), HasSubstr("rank 0 gave up first")));
  std::thread other([&] {
    EXPECT_EQ(meet(*stores_->client(), plan_for(1, 2), "one", within(20s)).told,
              (std::vector<std::string>{"zero", "one"}));
  });
  EXPECT_EQ(meet(*store, plan_for(0, 2), "zero", within(20s)).told, (std::vector<std::string>{"zero", "one"}));
  other.join();
}

TEST_P(MeetingTest, ARankThatGivesUpTellsTheOthers) {
  std::thread impatient([&] { EXPECT_THROW(meet(*stores_->client(), plan_for(1, 3), "", within(300ms)), CommError); });
  const auto start = Deadline::Clock::now();
  const auto text = message_of<CommError>([&] { meet(*stores_->client(), plan_for(0, 3), "", within(60s)); });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 2"), HasSubstr("rank 1 gave up first")));
  EXPECT_LT(Deadline::Clock::now() - start, 30s);
  impatient.join();
}

TEST(Meeting, RanksThatDoNotFitTogetherAreToldWhichAreThere) {
  MemoryStore store;
  std::thread first([&] {
    EXPECT_THROW(meet(store, plan_for(1, 2, "run a"), "", within(3s)), CommError);  // nobody comes
  });
  while (store.keys("here/", within(5s)).size() < 3) std::this_thread::sleep_for(1ms);  // it has taken its seat
  const std::string me = concat("process ", getpid(), " on ", host_name());
  const auto error_of = [&](const MeetingPlan& plan) {
    return message_of<InvalidArgument>([&] { meet(store, plan, "", within(20s)); });
  };
  EXPECT_THAT(error_of(plan_for(1, 2, "run a")), AllOf(HasSubstr("rank 1 is there already"), HasSubstr(me)));
  EXPECT_THAT(error_of(plan_for(0, 3, "run a")), AllOf(HasSubstr("world of 3"), HasSubstr("another one of 2")));
  EXPECT_THAT(error_of(plan_for(0, 2, "run b")), AllOf(HasSubstr("'run a'"), HasSubstr("'run b'"), HasSubstr(me)));
  first.join();
}

class MeetingOfProcesses : public testing::Test {
 protected:
  // A process that waits as this rank, and never comes to an end by itself.
  pid_t start_rank(int rank, int size) {
    const pid_t child = fork();
    if (child != 0) return child;
    try {
      FileStore store(path_);
      meet(store, plan_for(rank, size), "old", within(60s));
    } catch (...) {
    }
    _exit(1);
  }
  void await_seats(int64_t seats) {
    FileStore store(path_);
    const Deadline limit = within(20s);
    const auto count = [&] {
      int64_t found = 0;
      for (const auto& key : store.keys("here/", within(5s))) found += key.find("/seat/") != std::string::npos;
      return found;
    };
    while (count() < seats && !limit.passed()) std::this_thread::sleep_for(2ms);
    ASSERT_EQ(count(), seats);
  }
  static void kill_and_reap(pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }

  ScratchFolder folder_;
  const std::string path_ = folder_.path("store");
};

TEST_F(MeetingOfProcesses, WhatAKilledJobHasLeftIsAbandoned) {
  const pid_t child = start_rank(1, 2);
  await_seats(1);
  kill_and_reap(child);
  // Without the other's death, rank 0 would be let in beside it.
  std::thread other([&] {
    FileStore store(path_);
    EXPECT_EQ(meet(store, plan_for(1, 2), "new 1", within(20s)).told, (std::vector<std::string>{"new 0", "new 1"}));
  });
  FileStore store(path_);
  EXPECT_EQ(meet(store, plan_for(0, 2), "new 0", within(20s)).told, (std::vector<std::string>{"new 0", "new 1"}));
  other.join();
}

TEST_F(MeetingOfProcesses, ARankThatDiesWhileOthersWaitIsNamed) {
  const pid_t child = start_rank(1, 3);
  await_seats(1);
  std::thread killer([&] {
    await_seats(2);
    kill_and_reap(child);
  });
  FileStore store(path_);
  const auto start = Deadline::Clock::now();
  const auto text = message_of<CommError>([&] { meet(store, plan_for(0, 3), "", within(60s)); });
  EXPECT_THAT(text, HasSubstr(concat("rank 1 (process ", child, " on ", host_name(), ") ended")));
  EXPECT_LT(Deadline::Clock::now() - start, 30s);
  killer.join();
}

}  // namespace
}  // namespace chorale::transport
