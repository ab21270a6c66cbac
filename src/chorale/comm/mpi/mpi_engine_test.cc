// Groups over MPI. These are ranks that tests/mpi_test.py starts with mpirun; other tests of comm run there too.
#include "chorale/comm/mpi/mpi_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <limits>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

int mpi_rank() { return std::stoi(*config::env("OMPI_COMM_WORLD_RANK")); }
int mpi_size() { return std::stoi(*config::env("OMPI_COMM_WORLD_SIZE")); }

Group new_world(std::chrono::milliseconds timeout = 20s) {
  transport::MemoryStore unused;
  return Group::connect(unused, "world", mpi_rank(), mpi_size(), {.timeout = timeout, .fabric = "mpi"});
}

// Mpirun ends all ranks when one ends with something in flight, also those that have not said yet how their tests went.
class EndTogether final : public testing::EmptyTestEventListener {
  void OnTestProgramEnd(const testing::UnitTest& /*tests*/) override {
    std::fflush(stdout);
    try {
      new_world().barrier().wait();
    } catch (const std::exception& error) {
      std::cerr << "the ranks do not end together: " << error.what() << std::endl;
    }
  }
};
[[maybe_unused]] const bool end_together = [] {
  const bool rank = config::env("OMPI_COMM_WORLD_RANK").has_value();
  if (rank) testing::UnitTest::GetInstance()->listeners().Append(new EndTogether);
  return rank;
}();

TEST(RankOfMpirun, DISABLED_FactorsAndAveragesAreAppliedBeforeHalvesAreRounded) {
  const Group group = new_world();
  EXPECT_EQ(group.backend(), "mpi");
  const int size = group.size();
  // Each rank's own value rounds to 1 in bf16 if it is halved there; the sum does not.
  std::vector<bfloat16> halves(5, bfloat16(1.0078125f));
  group.all_reduce(std::span(halves), premultiplied_sum(0.5)).wait();
  for (bfloat16 x : halves)
    EXPECT_EQ(static_cast<float>(x), static_cast<float>(bfloat16(0.5f * 1.0078125f * static_cast<float>(size))));
  std::vector<bfloat16> means(5, bfloat16(static_cast<float>(3 * group.rank())));
  group.all_reduce(std::span(means), Reduce::kAverage).wait();
  for (bfloat16 x : means)
    EXPECT_EQ(static_cast<float>(x), static_cast<float>(bfloat16(1.5f * static_cast<float>(size - 1))));
  std::vector<complex64> complexes(5, complex64(static_cast<float>(group.rank()), 1));
  group.all_reduce(std::span(complexes), Reduce::kAverage).wait();
  EXPECT_EQ(complexes[4], complex64(static_cast<float>(size - 1) / 2, 1));
}

TEST(RankOfMpirun, DISABLED_NaNWinsAsEverywhere) {
  const Group group = new_world();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Reduce op : {Reduce::kMin, Reduce::kMax}) {
    std::vector<float> x{group.rank() == 0 ? nan : 1, group.rank() == 1 ? nan : 2, 3};
    group.all_reduce(std::span(x), op).wait();
    EXPECT_TRUE(std::isnan(x[0]) && std::isnan(x[1])) << x[0] << ' ' << x[1];
    EXPECT_EQ(x[2], 3);
  }
}

TEST(RankOfMpirun, DISABLED_DifferentCallsAreNamedOnEveryRankAndANewGroupWorks) {
  const int last = mpi_size() - 1;
  const auto wrong_on_last = [&](const Group& group, int which) {
    const bool odd = group.rank() == last;
    std::vector<float> x(odd && which == 0 ? 4 : 3);
    std::vector<double> y(3);
    const Reduction reduction = odd && which == 2 ? Reduce::kMax : Reduce::kSum;
    if (odd && which == 1) return group.all_reduce(std::span(y)).wait();
    if (odd && which == 3) return group.broadcast(std::span(x), 0).wait();
    if (odd && which == 4) return group.barrier().wait();
    group.all_reduce(std::span(x), reduction).wait();
  };
  const char* const wrong_call[] = {": all_reduce of 4 f32 (sum);", ": all_reduce of 3 f64 (sum);",
                                    ": all_reduce of 3 f32 (max);", ": broadcast of 3 f32, root 0;", ": barrier;"};
  for (int which = 0; which < 5; ++which) {
    const Group group = new_world();
    group.barrier().wait();
    EXPECT_THAT(message_blaming(last, [&] { wrong_on_last(group, which); }),
                AllOf(HasSubstr("ranks made different calls"), HasSubstr(": all_reduce of 3 f32 (sum);"),
                      HasSubstr(concat("rank ", last, wrong_call[which]))));
    EXPECT_TRUE(group.is_broken());
    EXPECT_THAT(message_of<CommError>([&] { group.barrier().wait(); }), HasSubstr("different calls"));
  }
}

// What rank 0 tells while it waits in its first call is about that one, not about those that it has started since.
TEST(RankOfMpirun, DISABLED_ARankThatWaitsWithSeveralCallsUnderWayIsUnderstood) {
  const Group group = new_world();
  const int last = group.size() - 1;
  std::vector<float> x(3, 1);
  std::vector<double> y(5, 1);
  if (group.rank() != 0) std::this_thread::sleep_for(300ms);  // rank 0 tells meanwhile
  Work first = group.all_reduce(std::span(x));
  if (group.rank() != 0) first.wait();
  if (group.rank() == last) std::this_thread::sleep_for(300ms);  // the others listen meanwhile
  Work second = group.all_reduce(std::span(y));
  first.wait();
  second.wait();
  EXPECT_EQ(x[2], static_cast<float>(group.size()));
  EXPECT_EQ(y[4], group.size());
}

TEST(RankOfMpirun, DISABLED_ChunksThatDoNotFitAreNamedOnEveryRank) {
  const Group group = new_world();
  const int size = group.size(), rank = group.rank();
  std::vector<Tensor> in, out;
  for (int r = 0; r < size; ++r) {
    in.push_back(Tensor::empty({rank == 0 && r == 1 ? 5 : 3}, DType::kF32));
    out.push_back(Tensor::empty({3}, DType::kF32));
  }
  EXPECT_THAT(message_blaming(0, [&] { group.all_to_all(out, in).wait(); }),
              HasSubstr("rank 0 gives 20 bytes where rank 1 takes 12"));
}

TEST(RankOfMpirun, DISABLED_AMessageThatDoesNotFitIsAnErrorOnBothSides) {
  const Group group = new_world();
  const Tensor three = Tensor::empty({3}, DType::kF32), four = Tensor::empty({4}, DType::kF32);
  const std::string error = message_of<CommError>([&] {
    if (group.rank() == 0) group.send(three, 1, 7);
    if (group.rank() == 1) group.recv(four, 0, 7);
    group.barrier().wait();
  });
  EXPECT_THAT(error, HasSubstr("rank 0 sent 12 bytes of f32 (tag 7) where rank 1 receives 16 bytes of f32"));
}

TEST(RankOfMpirun, DISABLED_LargeMessagesFindTheirPlaceByTag) {
  const Group group = new_world();
  const int64_t n = 300'000;
  const int next = (group.rank() + 1) % group.size(), before = (group.rank() + group.size() - 1) % group.size();
  std::vector<Tensor> kept;
  std::vector<Work> works;
  for (uint64_t tag : {uint64_t{1}, uint64_t{1} << 40, uint64_t{3}}) {
    const Tensor x = Tensor::empty({n}, DType::kF32);
    for (int64_t i = 0; i < n; ++i)
      x.data<float>()[i] = static_cast<float>(tag % 1000) + static_cast<float>(group.rank());
    works.push_back(group.isend(x, next, tag));
  }
  for (uint64_t tag : {uint64_t{3}, uint64_t{1}, uint64_t{1} << 40}) {
    const Tensor x = Tensor::empty({n}, DType::kF32);
    EXPECT_EQ(group.recv(x, kAnySource, tag), before);
    EXPECT_EQ(x.data<float>()[n - 1], static_cast<float>(tag % 1000) + static_cast<float>(before));
  }
  for (const Work& work : works) work.wait();
}

TEST(RankOfMpirun, DISABLED_ARankThatLeavesIsNamed) {
  const int last = mpi_size() - 1;
  Group group = new_world();
  group.barrier().wait();
  if (group.rank() == last) return group.destroy();
  EXPECT_THAT(message_blaming(last, [&] { group.barrier().wait(); }),
              AllOf(HasSubstr(concat("rank ", last, " has left the group")), HasSubstr("last entered barrier #1")));
}

TEST(RankOfMpirun, DISABLED_WhatARankHasThrownIsSaidByTheOthers) {
  const int last = mpi_size() - 1;
  const Group all = new_world();
  try {
    const Group group = all.duplicate();
    group.barrier().wait();
    if (group.rank() == last) {
      group.note_exception("out of memory");
      throw std::bad_alloc();
    }
    EXPECT_THAT(message_blaming(last, [&] { group.barrier().wait(); }),
                AllOf(HasSubstr(concat("rank ", last, " left the group because of an exception")),
                      HasSubstr("it last entered barrier #1, and then threw: out of memory")));
  } catch (const std::bad_alloc&) {
    EXPECT_EQ(all.rank(), last);
  }
  all.barrier().wait();
}

// Rank 1 is done when its part has left; the root still waits for that of rank 0, which is late.
TEST(RankOfMpirun, DISABLED_ARankMayLeaveWhileOthersAreInTheCallThatItHasCompleted) {
  const Group all = new_world();
  {
    const Group group = all.duplicate();
    const int last = group.size() - 1;
    group.barrier().wait();
    const Tensor x = Tensor::empty({3}, DType::kF32);
    std::fill_n(x.data<float>(), 3, 1.0f);
    const Work work = group.reduce(x, last);
    if (group.rank() == 0) std::this_thread::sleep_for(300ms);
    EXPECT_NO_THROW(work.wait());
    if (group.rank() == last) {
      EXPECT_EQ(x.data<float>()[2], static_cast<float>(group.size()));
    }
  }
  all.barrier().wait();  // the next test begins at the same time
}

// The last rank comes when all others have given it up.
TEST(RankOfMpirun, DISABLED_ALateRankIsNamedAtTheDeadline) {
  const Group all = new_world(), group = all.duplicate({.timeout = 300ms});
  const int last = group.size() - 1;
  std::vector<float> x(1000);
  group.all_reduce(std::span(x), Reduce::kSum, {.tag = 0, .timeout = 20s}).wait();
  if (group.rank() == last) {
    all.barrier().wait();
    EXPECT_THAT(message_of<CommError>([&] { group.all_reduce(std::span(x)).wait(); }),
                HasSubstr(concat("nothing from rank ", last)));
    return;
  }
  const auto start = Deadline::Clock::now();
  EXPECT_THAT(
      message_blaming(last, [&] { group.all_reduce(std::span(x)).wait(); }),
      AllOf(HasSubstr(concat("nothing from rank ", last)), HasSubstr("last entered all_reduce of 1000 f32 (sum) #1")));
  EXPECT_LT(Deadline::Clock::now() - start, 10s);  // the time of the group, not that of the world
  all.barrier().wait();
}

// Each waits for a message of the next one, and the last one for nobody: it is late.
TEST(RankOfMpirun, DISABLED_ALateRankIsNamedAlsoByRanksThatWaitForAnother) {
  const Group all = new_world();
  const Group group = all.duplicate({.timeout = 300ms});
  const int last = group.size() - 1;
  const Tensor x = Tensor::empty({3}, DType::kF32);
  if (group.rank() != last) {
    EXPECT_THAT(message_blaming(last, [&] { group.recv(x, group.rank() + 1); }),
                HasSubstr(concat("nothing from rank ", last)));
  }
  all.barrier().wait();
}

TEST(RankOfMpirun, DISABLED_ErrorsOfASubgroupNameRanksOfTheJob) {
  const Group all = new_world();
  const int last = all.size() - 1;
  std::vector<int> later;
  for (int r = 1; r < all.size(); ++r) later.push_back(r);
  const Group rest = all.new_group(later, {.timeout = 300ms});
  const Tensor x = Tensor::empty({3}, DType::kF32);
  if (all.rank() > 0 && all.rank() < last) {
    rest.barrier().wait();
    EXPECT_THAT(message_blaming(last, [&] { rest.broadcast(x, last).wait(); }),
                AllOf(HasSubstr(concat("rank ", all.rank(), " (group ")), HasSubstr(": ranks 1, "),
                      HasSubstr(concat("nothing from rank ", last)), HasSubstr("last entered barrier #1")));
  } else if (all.rank() == last) {
    rest.barrier().wait();
  }
  all.barrier().wait();
}

TEST(RankOfMpirun, DISABLED_AMonitoredBarrierNamesTheRankThatStaysAway) {
  const Group all = new_world(), group = all.duplicate();
  const int last = group.size() - 1;
  group.monitored_barrier(20s);
  if (group.rank() == last) {
    all.barrier().wait();  // the others have given it up
    EXPECT_THAT(message_of<CommError>([&] { group.monitored_barrier(20s); }), HasSubstr("did not reach it"));
    return;
  }
  const std::string error = message_blaming(last, [&] { group.monitored_barrier(200ms); });
  EXPECT_THAT(error, HasSubstr(concat("rank ", last, " did not reach it")));
  if (group.rank() > 0) {
    EXPECT_THAT(error, HasSubstr("failed waiting on rank 0"));
  }
  all.barrier().wait();
}

TEST(RankOfMpirun, DISABLED_SubgroupsWorkAtTheSameTime) {
  const Group group = new_world();
  const Group half = group.split(group.rank() % 2), copy = group.duplicate();
  std::vector<int64_t> x{group.rank() + 1}, y{1};
  const Work first = copy.all_reduce(std::span(y));
  half.all_reduce(std::span(x)).wait();
  first.wait();
  int64_t expected = 0;
  for (int r = group.rank() % 2; r < group.size(); r += 2) expected += r + 1;
  EXPECT_EQ(x[0], expected);
  EXPECT_EQ(y[0], group.size());
  EXPECT_EQ(half.size(), (group.size() + 1 - group.rank() % 2) / 2);
}

// This one runs apart from the others, since mpirun ends the job.
TEST(KilledRankOfMpirun, DISABLED_TakesTheJobWithIt) {
  const Group group = new_world(60s);
  group.barrier().wait();
  if (group.rank() == mpi_size() - 1) raise(SIGKILL);
  group.barrier().wait();
}

// This one needs no mpirun.
TEST(Mpi, AGroupOutsideOfMpirunIsAnErrorThatSaysHowToStart) {
  transport::MemoryStore store;
  try {
    Group::connect(store, "world", 0, 1, {.timeout = 1s, .fabric = "mpi"});
    FAIL();
  } catch (const StateError& error) {
    EXPECT_THAT(error.what(), HasSubstr("mpirun -n 1 PROGRAM"));
  }
}

}  // namespace
}  // namespace chorale::comm
