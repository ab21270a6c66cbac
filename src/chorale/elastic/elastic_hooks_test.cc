// Jobs whose hooks of communication know something from step to step: a step that is done again leaves no trace in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/elastic/elastic.h"
#include "chorale/elastic/job_test_util.h"
#include "chorale/elastic/thread_job_test_util.h"

namespace chorale::elastic {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kSteps = 7;

// The job that ran has the bits, and each rank's hook the state, of ranks that computed the same steps together and
// never died. `averaged_by_left`: a step behind which only those that are left could average parameters.
void expect_same_as_undisturbed(JobHook hook, const std::map<int, JobResult>& results, int64_t averaged_by_left) {
  std::vector<int> left;
  for (const auto& [member, result] : results) left.push_back(member);
  std::vector<std::vector<int>> ranks;
  for (const int size : results.begin()->second.sizes)
    ranks.push_back(size == kRanks ? std::vector<int>{0, 1, 2} : left);
  std::vector<std::vector<int>> averaging = ranks;
  if (averaged_by_left >= 0) averaging[static_cast<size_t>(averaged_by_left)] = left;
  std::map<int, JobResult> expected;
  std::mutex mutex;
  comm::run_ranks(kRanks, [&](comm::Group& group) {
    const std::optional<JobResult> result = run_with_memberships(group, hook, ranks, averaging);
    const std::lock_guard lock(mutex);
    if (result) expected[group.rank()] = *result;
  });
  ASSERT_EQ(expected.size(), results.size());
  for (const auto& [member, result] : results) {
    ASSERT_TRUE(expected.contains(member));
    const JobResult& wanted = expected.at(member);
    ASSERT_EQ(result.losses.size(), wanted.losses.size());
    for (size_t step = 0; step < wanted.losses.size(); ++step)
      EXPECT_NEAR(result.losses[step], wanted.losses[step], 1e-12) << "step " << step;
    EXPECT_EQ(result.bits, wanted.bits) << "of member " << member;
    EXPECT_EQ(result.hook_state, wanted.hook_state) << "of member " << member;
  }
}

// Rank 1 dies around step 4, in each phase; rank 0 with it where the phase is one of a change of ranks.
void expect_deaths_to_leave_no_trace(JobHook hook) {
  std::vector<std::string> phases = {"begin",  "forward", "backward",  "bucket",  "commit",
                                     "update", "applied", "agreement", "meeting", "transfer"};
  if (hook == JobHook::kLocalSgd) phases.emplace_back("average");
  for (const std::string& phase : phases) {
    SCOPED_TRACE(phase);
    const bool in_change = phase == "agreement" || phase == "meeting" || phase == "transfer";
    std::vector<Kill> kills{{1, 4, in_change ? "backward" : phase}};
    if (in_change) kills.push_back({0, 4, phase});
    Threads job(kRanks, kSteps, kills);
    job.replaces = false;
    job.hook = hook;
    const auto results = job.run();
    ASSERT_EQ(results.size(), kRanks - kills.size());
    // These come behind step 3, when 4 steps are done, and before its averages are taken over.
    expect_same_as_undisturbed(hook, results, phase == "applied" || phase == "average" ? 3 : -1);
  }
}

TEST(ElasticHooks, WhatPowerSgdRemembersIsThatOfJobsWithoutDeaths) {
  expect_deaths_to_leave_no_trace(JobHook::kPowerSgd);
}

TEST(ElasticHooks, PostLocalSgdCountsEachStepOnceAndMakesItsGroupAnew) {
  expect_deaths_to_leave_no_trace(JobHook::kPostLocalSgd);
}

TEST(ElasticHooks, AveragesOfParametersAreTakenOverByAllOrByNone) {
  expect_deaths_to_leave_no_trace(JobHook::kLocalSgd);
}

TEST(ElasticHooks, ANewcomerGoesOnWithTheDirectionsOfTheOthers) {
  Threads job(kRanks, 40, {{1, 5, "backward"}});
  job.hook = JobHook::kPowerSgd;
  // The job waits for the replacement before its last steps, so that there are some with it.
  job.before_step = [&](int64_t step) {
    if (step != 30) return;
    const Deadline patience = within(std::chrono::seconds(20));
    while (job.latest().rank_of(3) < 0 && !patience.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const auto results = job.run();
  ASSERT_TRUE(results.contains(3));
  const JobResult& newcomer = results.at(3);
  EXPECT_EQ(newcomer.sizes.back(), kRanks);
  for (const auto& [member, result] : results) {
    EXPECT_EQ(result.bits, newcomer.bits);
    EXPECT_EQ(result.losses, newcomer.losses);
    EXPECT_EQ(result.hook_shared, newcomer.hook_shared);
    EXPECT_GT(result.hook_state.size(), result.hook_shared.size()) << "it has errors of its own";
  }
}

}  // namespace
}  // namespace chorale::elastic
