// Faults on purpose in a group on one host: what a job must survive changes nothing, what it cannot is found and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <iostream>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/world.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// What rank r holds at index i.
float number(int rank, size_t i) { return static_cast<float>(1000 * rank) + static_cast<float>(i % 997); }
std::vector<float> numbers(int rank, size_t count) {
  std::vector<float> list(count);
  for (size_t i = 0; i < count; ++i) list[i] = number(rank, i);
  return list;
}

// Ten calls, small and large, whose results are known.
void ten_calls(Group& group) {
  const int size = group.size(), rank = group.rank();
  for (int64_t count : {5, 3000, 100'000}) {
    const auto elems = static_cast<size_t>(count);
    std::vector<float> x = numbers(rank, elems);
    group.all_reduce(std::span(x)).wait();
    for (size_t i = 0; i < elems; ++i) {
      float sum = 0;
      for (int r = 0; r < size; ++r) sum += number(r, i);
      ASSERT_EQ(x[i], sum) << i << " of " << count;
    }
    const Tensor ours = Tensor::from(numbers(rank, elems), {count});
    group.broadcast(ours, size - 1).wait();
    EXPECT_EQ(ours.to_vector<float>(), numbers(size - 1, elems));
    const std::vector<float> own = numbers(rank, elems);
    std::vector<float> all(elems * static_cast<size_t>(size), -1), expected;
    group.all_gather_into(std::span(all), std::span<const float>(own)).wait();
    for (int r = 0; r < size; ++r) {
      const std::vector<float> theirs = numbers(r, elems);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    EXPECT_EQ(all, expected);
  }
  group.barrier().wait();
}

TEST(ChaosInAGroup, LateAndStallingRanksChangeNoResult) {
  run_threads_and_processes(
      3, ten_calls,
      {.timeout = 20s, .chaos = "delay@rank=0,call=2,ms=30;stall@rank=2,call=4,ms=30;stall@rank=1,call=7,ms=30"});
}

// What each of the three ranks is told, culprit and text, when rank 1 does something to its call number 2.
void expect_damage(const char* plan, bool checksum, const std::function<void(Group&)>& body, const char* what) {
  run_threads_and_processes(3,
                            [&](Group& group) {
                              group.barrier().wait();
                              try {
                                body(group);
                                group.barrier().wait();  // a rank without a part in it hears of it here
                                ADD_FAILURE() << "rank " << group.rank() << " saw no error for " << plan;
                              } catch (const CommError& error) {
                                EXPECT_EQ(error.failure().peer, 1) << error.what();
                                EXPECT_THAT(error.what(), HasSubstr(concat(what, " of rank 1")));
                                EXPECT_THAT(error.what(), HasSubstr("is damaged"));
                              }
                              EXPECT_TRUE(group.is_broken());
                            },
                            {.timeout = 20s, .checksum = checksum, .chaos = plan});
}

void all_reduce_of(Group& group, int64_t count) {
  group.all_reduce(Tensor::from(numbers(group.rank(), static_cast<size_t>(count)), {count})).wait();
}
void ring_of(Group& group, int64_t count) {
  const int right = (group.rank() + 1) % 3, left = (group.rank() + 2) % 3;
  const Tensor x = Tensor::from(numbers(group.rank(), static_cast<size_t>(count)), {count}),
               y = Tensor::empty({count}, DType::kF32);
  const Work sent = group.isend(x, right), received = group.irecv(y, left);
  sent.wait();
  received.wait();
}

TEST(ChaosInAGroup, ADamagedControlMessageIsFoundAndNamesItsOwner) {
  const char* plan = "corrupt@rank=1,call=2";
  for (int64_t count : {7, 100'000}) {
    expect_damage(
        plan, false, [&](Group& group) { all_reduce_of(group, count); }, "the control message");
    expect_damage(
        plan, false, [&](Group& group) { ring_of(group, count); }, "a message's head");
  }
}

TEST(ChaosInAGroup, WithChecksumsDamagedDataIsFoundAndNamesItsOwner) {
  const char* plan = "corrupt@rank=1,call=2,what=payload";
  for (int64_t count : {7, 3000, 100'000}) {
    expect_damage(
        plan, true, [&](Group& group) { all_reduce_of(group, count); }, "the data");
    expect_damage(
        plan, true, [&](Group& group) { ring_of(group, count); }, "a message");
    expect_damage(
        plan, true,
        [&](Group& group) {
          const Tensor in = Tensor::from(numbers(group.rank(), static_cast<size_t>(3 * count)), {3 * count});
          group.all_to_all_single(Tensor::empty({3 * count}, DType::kF32), in).wait();
        },
        "the data");
  }
}

// Rank 1 is killed as it enters its fifth call.
TEST(ChaosInAGroup, ARankIsKilledInTheCallThatThePlanNames) {
  const auto body = [](Group& group) {
    int calls = 0;
    try {
      for (; calls < 10; ++calls) group.barrier().wait();
      ADD_FAILURE() << "nobody was killed";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peer, 1) << error.what();
      EXPECT_EQ(calls, 4);
    }
  };
  EXPECT_EQ(run_processes(3, body, {.timeout = 20s, .chaos = "kill@rank=1,call=5"}),
            (std::vector<int>{0, -SIGKILL, 0}));
}

TEST(ChaosInAGroup, ChecksumsChangeNoResult) {
  run_threads_and_processes(3, ten_calls, {.timeout = 20s, .checksum = true});
}

TEST(ChaosInAGroup, ARankWithoutChecksumsAmongOthersIsAnError) {
  transport::MemoryStore store;
  const auto rank = [&](int which) {
    Group group = Group::connect(store, "world", which, 2, {.timeout = 20s, .checksum = which == 1});
    try {
      group.barrier().wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 0: barrier; rank 1: barrier, with checksums"));
    }
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
}

// A program for the tests of `chorale run` (tests/run_test.py).
TEST(RankOfALauncher, DISABLED_MakesTwentyCalls) {
  World world;
  world.init("env://");
  for (int call = 0; call < 20; ++call) {
    std::vector<float> x(5000, 1);
    world.group().all_reduce(std::span(x)).wait();
    ASSERT_EQ(x, std::vector<float>(5000, static_cast<float>(world.group().size())));
  }
  std::cout << "twenty calls" << std::endl;
}

}  // namespace
}  // namespace chorale::comm
