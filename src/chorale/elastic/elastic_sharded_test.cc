// Jobs whose ranks each have a part of the model, and lose some of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "chorale/base/comm_error.h"
#include "chorale/comm/leaving.h"
#include "chorale/elastic/thread_job_test_util.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::elastic {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// Copies, and nothing on disk.
ShardedJob with_copies(int64_t every) { return {.options = {.copy_every = every}}; }

int64_t steps_back(const JobResult& result) {
  int64_t sum = 0;
  for (const Change& change : result.changes) sum += change.steps_back;
  return sum;
}

TEST(ElasticSharded, WithoutDeathsAJobIsThatOfOneRank) {
  for (const bool hybrid : {false, true}) {
    Threads job(4, 6, {}, ShardedJob{.options = {.copy_every = 2}, .hybrid = hybrid});
    const auto results = job.run();
    EXPECT_EQ(results.size(), 4);
    expect_all_alike(results, 6);
    for (const auto& [member, result] : results) {
      EXPECT_EQ(result.changes.size(), 1);
      EXPECT_EQ(result.copies.count, 3);  // of steps 0, 2 and 4
      EXPECT_GT(result.copies.bytes, 0);
    }
  }
}

// The rank that dies before a change of ranks is no neighbour, so that the parts of both are somewhere.
TEST(ElasticSharded, ADeathInAnyPhaseIsSurvived) {
  expect_deaths_survived(
      4,
      {"begin", "forward", "backward", "bucket", "copy", "commit", "update", "applied", "agreement", "meeting",
       "transfer", "finish"},
      [](int rank) { return rank == 0 ? 2 : 0; }, with_copies(2));
}

// The parts of the dead rank are in its neighbour's memory, as they were at the last copy.
TEST(ElasticSharded, AfterADeathAllGoBackToTheLastCopy) {
  Threads job(3, 8, {{1, 5, "backward"}}, with_copies(3));
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 2);
  expect_all_alike(results, 8);
  for (const auto& [member, result] : results) {
    EXPECT_EQ(result.sizes, (std::vector<int>{3, 3, 3, 2, 2, 2, 2, 2}));
    ASSERT_EQ(result.changes.size(), 2);
    EXPECT_EQ(result.changes.back().steps_back, 2);
    EXPECT_EQ(result.changes.back().step, 3);
    EXPECT_TRUE(result.changes.back().repeated);
  }
}

// A rank dies in the middle of a copy: nobody has its parts of then, and the copy before is used.
TEST(ElasticSharded, ADeathDuringACopyLeavesTheCopyBefore) {
  Threads job(4, 8, {{2, 4, "copy"}}, with_copies(2));
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 3);
  expect_all_alike(results, 8);
  for (const auto& [member, result] : results) {
    EXPECT_EQ(steps_back(result), 2);
    EXPECT_EQ(result.sizes, (std::vector<int>{4, 4, 3, 3, 3, 3, 3, 3}));
  }
}

// The first copy of the new epoch is cut short, too: the second death comes when only the older copy is whole.
TEST(ElasticSharded, ADeathInTheCopyThatFollowsAChangeLeavesTheOlderOne) {
  Threads job(4, 8, {{2, 5, "forward"}, {0, 4, "recopy"}}, with_copies(4));
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 2);
  expect_all_alike(results, 8);
  for (const auto& [member, result] : results)
    EXPECT_EQ(std::vector(result.sizes.begin() + 4, result.sizes.end()), (std::vector<int>{2, 2, 2, 2}));
}

TEST(ElasticSharded, AnotherReplicaHasTheStateAsItIs) {
  Threads job(4, 6, {{3, 3, "backward"}}, ShardedJob{.options = {.copy_every = 0}, .hybrid = true});
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 3);
  expect_all_alike(results, 6);
  for (const auto& [member, result] : results) {
    EXPECT_EQ(steps_back(result), 0);
    EXPECT_EQ(result.copies.count, 0);
    EXPECT_EQ(result.sizes, (std::vector<int>{4, 4, 4, 3, 3, 3}));
  }
}

TEST(ElasticSharded, TwoThatAreNoNeighboursMayDieAtOnce) {
  Threads job(4, 6, {{0, 3, "forward", true}, {2, 3, "forward", true}}, with_copies(2));
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 2);
  expect_all_alike(results, 6);
}

// A rank and the one that has its copy: what is left is the checkpoint, or an error.
TEST(ElasticSharded, NeighboursThatDieAtOnceLeaveTheCheckpoint) {
  const std::vector<Kill> kills{{1, 5, "forward", true}, {2, 5, "forward", true}};
  {
    const TemporaryFolder folder;
    Threads job(4, 8, kills, ShardedJob{.options = {.copy_every = 2, .folder = folder / "saved", .save_every = 3}});
    job.replaces = false;
    const auto results = job.run();
    ASSERT_EQ(results.size(), 2);
    expect_all_alike(results, 8);
    for (const auto& [member, result] : results) EXPECT_EQ(result.sizes, (std::vector<int>{4, 4, 4, 2, 2, 2, 2, 2}));
  }
  Threads job(4, 8, kills, with_copies(2));
  job.replaces = false;
  job.may_fail = true;
  EXPECT_TRUE(job.run().empty());
  ASSERT_EQ(job.errors.size(), 2);
  for (const std::string& error : job.errors)
    EXPECT_THAT(error, testing::AllOf(HasSubstr("the state of the job is lost"), HasSubstr("no folder")));
}

// With the other replica they are not lost.
TEST(ElasticSharded, NeighboursThatDieAtOnceAreInTheOtherReplica) {
  Threads job(4, 6, {{2, 3, "forward", true}, {3, 3, "forward", true}},
              ShardedJob{.options = {.copy_every = 0}, .hybrid = true});
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 2);
  expect_all_alike(results, 6);
  for (const auto& [member, result] : results) EXPECT_EQ(steps_back(result), 0);
}

// A program that has checkpoints of its own; here it begins again. Both deaths of each schedule take parts along that
// nobody else has: the second one before the job has come through a step again.
TEST(ElasticSharded, APartThatIsLostIsLostAlsoBeforeAStepWasDone) {
  for (const std::vector<Kill>& kills :
       std::vector<std::vector<Kill>>{{{1, 0, "forward"}}, {{1, 3, "backward"}, {0, 0, "lost"}}}) {
    SCOPED_TRACE(text_of(kills));
    std::atomic<int> given = 0;
    Threads job(3, 6, kills, ShardedJob{.options = {.copy_every = 0, .lost = [&given] { ++given; }}});
    job.replaces = false;
    const auto results = job.run();
    ASSERT_EQ(results.size(), 3 - kills.size());
    expect_all_alike(results, 6);
    EXPECT_EQ(given, std::ssize(results)) << "values are given on each rank that is left, once";
  }
}

// Those of the other replica are not whole before all have values.
TEST(ElasticSharded, AReplicaThatGetsItsValuesJustNowIsNotTaken) {
  std::atomic<int> given = 0;
  Threads job(4, 6, {{1, 3, "forward", true}, {3, 3, "forward", true}, {2, 0, "lost"}},
              ShardedJob{.options = {.copy_every = 0, .lost = [&given] { ++given; }}, .hybrid = true});
  job.replaces = false;
  const auto results = job.run();
  ASSERT_EQ(results.size(), 1);
  expect_all_alike(results, 6);
  EXPECT_EQ(given, 1);
}

TEST(ElasticSharded, AJobBeginsWithTheCheckpointThatIsThere) {
  const TemporaryFolder folder;
  const ShardedJob saves{.options = {.copy_every = 0, .folder = folder / "saved", .save_every = 4}};
  expect_all_alike(Threads(3, 6, {}, saves).run(), 6);  // saved at 4
  const auto results = Threads(2, 9, {}, saves).run();
  ASSERT_EQ(results.size(), 2);
  expect_all_alike(results, 9);
  for (const auto& [member, result] : results) EXPECT_EQ(result.sizes, (std::vector<int>{3, 3, 3, 3, 2, 2, 2, 2, 2}));
}

TEST(ElasticSharded, AReplacementGetsItsPart) {
  Threads job(3, 40, {{1, 3, "backward"}}, with_copies(2));
  job.before_step = [&](int64_t step) {
    if (step != 30) return;
    const Deadline patience = within(20s);
    while (job.latest().rank_of(3) < 0 && !patience.passed()) std::this_thread::sleep_for(1ms);
  };
  const auto results = job.run();
  expect_all_alike(results, 40);
  ASSERT_TRUE(results.contains(3));
  EXPECT_EQ(results.at(3).last_rank, 2);
  EXPECT_EQ(results.at(3).sizes.back(), 3);
  for (const auto& [member, result] : results) EXPECT_LE(steps_back(result), 1);  // of step 2; joining costs none
}

// Ranks that leave on demand hand over their parts: no step is done again.
TEST(ElasticSharded, AJobThatShrinksLosesNoStep) {
  for (const int rest : {3, 2, 1}) {
    SCOPED_TRACE(rest);
    Threads job(4, 8, {}, with_copies(100));
    job.before_step = [&](int64_t step) {
      if (step == 3) job.resize(rest);
      const Deadline patience = within(20s);
      while (step == 3 && job.latest().number < 2 && !patience.passed()) std::this_thread::sleep_for(1ms);
    };
    const auto results = job.run();
    ASSERT_EQ(results.size(), rest);
    expect_all_alike(results, 8);
    for (const auto& [member, result] : results) {
      EXPECT_EQ(steps_back(result), 0);
      EXPECT_EQ(result.sizes.back(), rest);
    }
  }
}

TEST(ElasticSharded, TheSameHistoryOfRanksGivesTheSameBits) {
  std::vector<JobResult> runs;
  for (int i = 0; i < 2; ++i) {
    Threads job(4, 6, {{0, 2, "forward"}, {1, 3, "backward"}}, with_copies(2));
    job.replaces = false;
    const auto results = job.run();
    EXPECT_EQ(results.size(), 2);
    expect_all_alike(results, 6);
    runs.push_back(results.begin()->second);
  }
  EXPECT_EQ(runs[0].sizes, (std::vector<int>{4, 4, 2, 2, 2, 2}));
  EXPECT_EQ(runs[0].sizes, runs[1].sizes);
  EXPECT_EQ(runs[0].losses, runs[1].losses);
  EXPECT_EQ(runs[0].bits, runs[1].bits);
}

TEST(ElasticSharded, EpochsLeaveNothingBehind) { expect_epochs_to_leave_nothing(with_copies(10)); }

// A rank that waits in a group of some ranks only, where nobody has died, hears that another one goes on without it.
TEST(ElasticSharded, WhoGoesOnBreaksAllGroupsOfItsRanks) {
  comm::run_ranks(3, [](comm::Group& group) {
    const comm::Group pair = group.new_group({0, 1});
    group.barrier().wait();
    if (group.rank() == 1) return comm::abandon(group, "goes on alone");
    if (group.rank() == 2) return;
    std::vector<double> x{1};
    EXPECT_THAT(message_of<CommError>([&] { pair.all_reduce(std::span(x)).wait(); }), HasSubstr("goes on alone"));
    EXPECT_THROW(pair.barrier().wait(), CommError);
  });
}

// Two or three deaths at any moment; neighbours that die at once leave the checkpoint.
TEST(ElasticSharded, SeededSchedulesEndAsAJobWithoutDeaths) {
  const int schedules = seeds_to_try(8, 5000);
  for (int seed = 0; seed < schedules; ++seed) {
    const TemporaryFolder folder;
    const std::vector<Kill> kills = random_kills(static_cast<uint64_t>(seed), 4, 6, true);
    SCOPED_TRACE(concat("seed ", seed, ": ", text_of(kills)));
    Threads job(
        4, 6, kills,
        ShardedJob{.options = {.copy_every = 2, .folder = folder / "saved", .save_every = 2}, .hybrid = seed % 3 == 0});
    job.replaces = seed % 2 == 0;
    expect_all_alike(job.run(), 6);
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace chorale::elastic
