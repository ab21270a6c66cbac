// Groups that span hosts: threads that behave as if they were on different hosts (run_hosts).
#include "chorale/comm/net/net_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <latch>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// The values of a rank: no two orders of additions give the same sum.
Tensor values_of(int rank, int64_t count, DType dtype) {
  const Tensor x = Tensor::empty({count}, dtype);
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = 0; i < count; ++i) {
      const float value = 1.0f / static_cast<float>(1 + 3 * rank + i % 1009);
      if constexpr (is_complex(dtype_of<T>)) {
        x.data<T>()[i] = T(value, -value);
      } else if constexpr (!std::is_same_v<T, bool>) {
        x.data<T>()[i] = static_cast<T>(value);
      }
    }
  });
  return x;
}

// What Note [Order of sums] says of the values of all ranks.
Tensor reference(int size, int64_t count, DType dtype, Reduction reduction) {
  std::vector<Tensor> values;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) {
    values.push_back(values_of(rank, count, dtype));
    sources.push_back(values.back().raw());
  }
  const Tensor sum = Tensor::empty({count}, dtype);
  void* out[] = {sum.raw()};
  vec::combine(reduction.op, dtype, sources, out, count, reduction.factor);
  return sum;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const size_t bytes = static_cast<size_t>(a.elems()) * a.elem_bytes();
  return a.elems() == b.elems() && (bytes == 0 || std::memcmp(a.raw(), b.raw(), bytes) == 0);
}

const std::vector<std::vector<int>> kLayouts = {{0, 1}, {0, 0, 1, 1}, {0, 0, 0, 1, 1}, {0, 0, 1}, {0, 1, 0, 1}};

void expect_reference(Group& group, int64_t count, DType dtype, Reduction reduction) {
  SCOPED_TRACE(concat(group.size(), " ranks, ", count, " of ", dtype, ", ", name_of(reduction.op)));
  const Tensor expected = reference(group.size(), count, dtype, reduction);
  const Tensor all = values_of(group.rank(), count, dtype), one = values_of(group.rank(), count, dtype);
  group.all_reduce(all, reduction).wait();
  EXPECT_TRUE(same_bits(all, expected)) << "all_reduce";
  group.reduce(one, group.size() - 1, reduction).wait();
  EXPECT_TRUE(group.rank() != group.size() - 1 || same_bits(one, expected)) << "reduce";
  // Rank r gets r elements more than rank 0.
  std::vector<Tensor> given;
  given.reserve(static_cast<size_t>(group.size()));
  for (int r = 0; r < group.size(); ++r) given.push_back(values_of(group.rank(), count / 2 + r, dtype));
  const Tensor own = Tensor::empty({count / 2 + group.rank()}, dtype);
  group.reduce_scatter(own, given, reduction).wait();
  EXPECT_TRUE(same_bits(own, reference(group.size(), own.elems(), dtype, reduction))) << "reduce_scatter";
}

TEST(NetEngine, SumsHaveTheBitsOfOneHostWhateverTheLayout) {
  for (const auto& hosts : kLayouts) {
    run_hosts(hosts, [](Group& group) {
      for (int64_t count : {5, 20'000}) {
        for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          expect_reference(group, count, dtype, Reduce::kAverage);
          expect_reference(group, count, dtype, premultiplied_sum(0.3));
        }
        expect_reference(group, count, DType::kBF16, Reduce::kProduct);
        expect_reference(group, count, DType::kF64, Reduce::kSum);
        expect_reference(group, count, DType::kC64, Reduce::kAverage);
      }
    });
  }
}

TEST(NetEngine, EveryAlgorithmGivesTheSameBits) {
  for (const char* table : {"all_reduce:0=leaders,reduce_scatter:0=direct",
                            "all_reduce:0=shards,reduce_scatter:0=shards", "all_reduce:0=direct"}) {
    setenv("CHORALE_ALGORITHMS", table, 1);
    for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 0, 0, 1, 1, 1, 1}}) {
      run_hosts(hosts, [](Group& group) {
        for (int64_t count : {0, 1, 7, 5000})
          for (DType dtype : {DType::kF32, DType::kBF16}) expect_reference(group, count, dtype, Reduce::kAverage);
      });
    }
  }
  unsetenv("CHORALE_ALGORITHMS");
}

TEST(NetEngine, LargeDataGoesInPieces) {
  constexpr int64_t kElems = (int64_t{2} << 20) + 5;
  for (const auto& hosts : {std::vector<int>{0, 1}, std::vector<int>{0, 0, 1, 1}}) {
    run_hosts(hosts, [](Group& group) {
      expect_reference(group, kElems, DType::kF32, Reduce::kSum);
      const Tensor x = values_of(group.rank(), kElems, DType::kF32);
      group.broadcast(x, 1).wait();
      EXPECT_TRUE(same_bits(x, values_of(1, kElems, DType::kF32)));
    });
  }
}

TEST(NetEngine, GroupsOfOneHostAreInSharedMemoryAndOthersAreNot) {
  run_hosts({0, 1, 0, 1}, [](Group& world) {
    EXPECT_NE(world.backend(), "shm");
    EXPECT_FALSE(world.is_on_one_host());
    Group host = world.split(world.rank() % 2), across = world.split(world.rank() / 2), again = world.duplicate();
    EXPECT_EQ(host.backend(), "shm");
    EXPECT_TRUE(host.is_on_one_host());
    EXPECT_EQ(across.backend(), world.backend());
    Group::Subgroups halves = across.new_subgroups(1);
    EXPECT_EQ(halves.groups[static_cast<size_t>(halves.own)].backend(), "shm");
    for (Group* group : {&host, &across, &again, &world}) {
      std::vector<int64_t> x(3, world.rank());
      group->all_reduce(std::span(x)).wait();
      int64_t sum = 0;
      for (int member : group->members()) sum += member;
      EXPECT_EQ(x, std::vector<int64_t>(3, sum));
    }
  });
}

// Ranks that know of different numbers of groups agree on the next one.
TEST(NetEngine, SubgroupsOfSubgroupsDoNotGetInEachOthersWay) {
  run_hosts({0, 1, 0, 1}, [](Group& world) {
    Group half = world.split(world.rank() / 2);
    std::vector<Group> more;
    more.reserve(3);
    for (int i = 0; i < (world.rank() < 2 ? 3 : 1); ++i) more.push_back(half.duplicate());
    Group again = world.duplicate();
    std::vector<float> x(70'000, 1);
    const Work first = more.back().all_reduce(std::span(x));
    std::vector<float> y(70'000, 1);
    const Work second = again.all_reduce(std::span(y));
    second.wait();
    first.wait();
    EXPECT_EQ(x[69'999], 2);
    EXPECT_EQ(y[69'999], 4);
  });
}

TEST(NetEngine, CallsOfAGroupRunInOrderWithoutAnybodyWaiting) {
  run_hosts({0, 1}, [](Group& group) {
    std::vector<std::vector<float>> buckets(8, std::vector<float>(10'000, 1));
    std::vector<Work> works;
    works.reserve(buckets.size());
    for (auto& bucket : buckets) works.push_back(group.all_reduce(std::span(bucket)));
    // Nobody waits and nobody asks: a thread of the group does the work.
    const auto limit = Clock::now() + 10s;
    const auto all_done = [&] {
      for (const Work& work : works) {
        if (work.operations()[0]->pending()) return false;
      }
      return true;
    };
    while (!all_done() && Clock::now() < limit) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(all_done());
    for (const Work& work : works) work.wait();
    for (const auto& bucket : buckets) EXPECT_EQ(bucket, std::vector<float>(10'000, 2));
  });
}

TEST(NetEngine, AnySourceHearsNeighboursAndOtherHosts) {
  run_hosts({0, 0, 1, 1}, [](Group& group) {
    for (int64_t count : {10, 50'000}) {
      const Tensor x = Tensor::empty({count}, DType::kI32);
      if (group.rank() != 0) {
        std::fill_n(x.data<int32_t>(), count, group.rank());
        group.send(x, 0, 9);
      } else {
        std::vector<int> sources;
        for (int i = 0; i < 3; ++i) {
          sources.push_back(group.recv(x, kAnySource, 9));
          EXPECT_EQ(x.data<int32_t>()[count - 1], sources.back());
        }
        EXPECT_THAT(sources, testing::UnorderedElementsAre(1, 2, 3));
      }
      group.barrier().wait();
    }
  });
}

TEST(NetEngine, MessagesWithAnotherTagDoNotHoldUpOthersAndOneToOneselfArrives) {
  run_hosts({0, 1}, [](Group& group) {
    const int peer = 1 - group.rank();
    const Tensor a = Tensor::from(std::vector<float>{1}, {1}), b = Tensor::from(std::vector<float>{2}, {1});
    const Tensor x = Tensor::empty({1}, DType::kF32), y = Tensor::empty({1}, DType::kF32);
    const std::vector<Work> sent{group.isend(a, peer, 1), group.isend(b, peer, 2)};
    EXPECT_EQ(group.recv(y, peer, 2), peer);
    EXPECT_EQ(group.recv(x, peer, 1), peer);
    EXPECT_EQ(*x.data<float>(), 1);
    EXPECT_EQ(*y.data<float>(), 2);
    const Work own = group.isend(b, group.rank(), 3);
    EXPECT_EQ(group.recv(x, group.rank(), 3), group.rank());
    EXPECT_EQ(*x.data<float>(), 2);
    for (const Work& work : sent) work.wait();
    own.wait();
  });
}

// More pieces than are received ahead, and not as many for every host.
TEST(NetEngine, LargeSumsOfManyPiecesAreExact) {
  for (const auto& hosts : {std::vector<int>{0, 1}, std::vector<int>{0, 1, 2}}) {
    run_hosts(hosts, [](Group& group) {
      const int64_t count = group.size() * int64_t{6} * (1 << 18) + 17;
      const Tensor x = Tensor::empty({count}, DType::kF32);
      for (int64_t i = 0; i < count; ++i) x.data<float>()[i] = static_cast<float>(i % 1000 + group.rank());
      group.all_reduce(x).wait();
      const int64_t extra = group.size() * (group.size() - 1) / 2;
      int64_t wrong = 0;
      for (int64_t i = 0; i < count; ++i)
        wrong += x.data<float>()[i] != static_cast<float>(group.size() * (i % 1000) + extra) ? 1 : 0;
      EXPECT_EQ(wrong, 0);
    });
  }
}

// Rank 3 comes late: every rank, whichever it waits for itself, hears that it was rank 3.
TEST(NetEngine, AtTheDeadlineTheRankThatDidNotComeIsNamed) {
  for (const auto& hosts : {std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1, 0, 1}}) {
    std::latch told(3);
    run_hosts(hosts, [&](Group& group) {
      std::vector<float> x(100'000, 1);
      group.all_reduce(std::span(x)).wait();
      if (group.rank() == 3) {
        told.wait();
        // What the others sent before they gave up may still complete this call, but no other one.
        EXPECT_THROW((group.all_reduce(std::span(x)).wait(), group.barrier().wait()), CommError);
        return;
      }
      const auto start = Clock::now();
      const CallOptions soon{.tag = 0, .timeout = 300ms};
      const std::string text = message_blaming(3, [&] { group.all_reduce(std::span(x), Reduce::kSum, soon).wait(); });
      EXPECT_THAT(text, AllOf(HasSubstr("timed out"), HasSubstr("nothing from rank 3")));
      EXPECT_LT(Clock::now() - start, 10s);
      told.count_down();
    });
  }
}

// Two of a host cannot know which of them is wrong: the third rank's call shows it.
TEST(NetEngine, OfDifferentCallsTheOneOfTheFewIsNamedWhereverItIsMade) {
  for (int odd : {0, 1, 2}) {
    run_hosts({0, 0, 1}, [&](Group& group) {
      const int root = group.rank() == odd ? 2 : 1;
      const std::string text =
          message_blaming(odd, [&] { group.broadcast(Tensor::empty({10}, DType::kF32), root).wait(); });
      EXPECT_THAT(text, AllOf(HasSubstr(concat("rank ", odd, ": broadcast of 10 f32, root 2")),
                              HasSubstr(": broadcast of 10 f32, root 1")));
    });
  }
}

// Nobody hears from it what it does instead, or only its neighbours do.
TEST(NetEngine, ARankThatSkipsAMonitoredBarrierIsNamedLongBeforeTheDeadline) {
  for (int odd : {0, 1, 3}) {
    run_hosts({0, 0, 1, 1}, [&](Group& group) {
      const auto start = Clock::now();
      const std::string text = message_blaming(odd, [&] {
        if (group.rank() != odd) group.monitored_barrier(60s);
        group.barrier().wait();
      });
      EXPECT_THAT(text, HasSubstr(concat("rank ", odd, ": barrier;")));
      EXPECT_LT(Clock::now() - start, 20s);
    });
  }
}

TEST(NetEngine, AWaiterWithAnEarlierDeadlineEndsACallThatAnotherThreadRuns) {
  std::latch told(1);
  run_hosts({0, 1}, [&](Group& group) {
    std::vector<float> x(10, 1);
    if (group.rank() == 1) {
      told.wait();
      EXPECT_THROW((group.all_reduce(std::span(x)).wait(), group.barrier().wait()), CommError);
      return;
    }
    const Work work = group.all_reduce(std::span(x));
    std::this_thread::sleep_for(50ms);  // the group's thread runs it by now; on any thread the same must happen
    const auto start = Clock::now();
    message_blaming(1, [&] { work.synchronize(within(100ms)); });
    EXPECT_LT(Clock::now() - start, 10s);
    EXPECT_TRUE(group.is_broken());
    told.count_down();
  });
}

TEST(NetEngine, ARankThatLeavesIsNamedAtOnceButNotBeforeItsLastCallIsDone) {
  for (int round = 0; round < 6; ++round) {
    run_hosts({0, 1, 1}, [&](Group& world) {
      Group group = world.duplicate({.timeout = 20s});
      std::vector<float> x(round % 2 == 0 ? 10 : 100'000, 1);
      group.all_reduce(std::span(x)).wait();
      EXPECT_EQ(x.back(), 3);
      if (group.rank() == 1) return;
      const auto start = Clock::now();
      const std::string text = message_blaming(1, [&] { group.barrier().wait(); });
      EXPECT_THAT(text, AnyOf(HasSubstr("rank 1"), HasSubstr("has left")));
      EXPECT_LT(Clock::now() - start, 5s);
    });
  }
}

// Ranks 1 and 3 of four are ranks 0 and 1 of their group, on two hosts.
TEST(NetEngine, ErrorsOfASubgroupNameRanksOfTheJobAndTheirHost) {
  run_hosts({0, 0, 1, 1}, [](Group& world) {
    const Group group = world.new_group({1, 3}, {.timeout = 300ms});
    if (world.rank() % 2 == 1) {
      const Tensor x = Tensor::empty({10}, DType::kF32);
      const int odd = 3;
      const std::string differ = message_blaming(odd, [&] { group.broadcast(x, world.rank()).wait(); });
      EXPECT_THAT(differ,
                  AllOf(HasSubstr(concat("rank ", world.rank(), " (group ")), HasSubstr(" of 2: ranks 1, 3): "),
                        HasSubstr("rank 1: broadcast of 10 f32, root 1; rank 3: broadcast of 10 f32, root 3;")));
    }
    const Group next = world.new_group({1, 3}, {.timeout = 300ms});
    if (world.rank() == 1) {
      EXPECT_THAT(message_blaming(3, [&] { next.broadcast(Tensor::empty({10}, DType::kF32), 3).wait(); }),
                  AllOf(HasSubstr("nothing from rank 3"), HasSubstr("rank 3 (on another host, 127.0.0.1, connected)")));
    }
    world.barrier().wait();
  });
}

}  // namespace
}  // namespace chorale::comm
