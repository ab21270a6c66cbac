#include "chorale/comm/algorithm/algorithms.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::comm {
namespace {

// Calls that move chunks, by every way: what comes depends on the place and on the giver.
void expect_moves(const Group& group) {
  const int rank = group.rank(), size = group.size();
  const auto value = [](int from, int to, int64_t i) { return static_cast<int32_t>(1000 * from + 100 * to + i % 97); };
  for (int64_t count : {1, 300, 3000, 9000}) {
    const auto chunk = [&](int from, int to) {
      const Tensor x = Tensor::empty({count}, DType::kI32);
      for (int64_t i = 0; i < count; ++i) x.data<int32_t>()[i] = value(from, to, i);
      return x;
    };
    const auto is_chunk = [&](const Tensor& x, int from, int to) {
      return x.to_vector<int32_t>() == chunk(from, to).to_vector<int32_t>();
    };
    const auto blank = [&](int how_many) {
      std::vector<Tensor> all;
      all.reserve(static_cast<size_t>(how_many));
      for (int i = 0; i < how_many; ++i) all.push_back(chunk(9, 9));
      return all;
    };
    const int root = size - 1;
    const Tensor word = chunk(rank, 0);
    group.broadcast(word, root).wait();
    EXPECT_TRUE(is_chunk(word, root, 0)) << count;
    const auto gathered = blank(size), taken = blank(size), at_root = blank(rank == root ? size : 0);
    group.all_gather(gathered, chunk(rank, 1)).wait();
    group.gather(at_root, chunk(rank, 2), root).wait();
    std::vector<Tensor> given;
    given.reserve(static_cast<size_t>(size));
    for (int to = 0; to < size; ++to) given.push_back(chunk(rank, to));
    group.all_to_all(taken, given).wait();
    const Tensor own = chunk(9, 9);
    group.scatter(own, rank == root ? given : std::vector<Tensor>(), root).wait();
    EXPECT_TRUE(is_chunk(own, root, rank)) << count;
    for (int from = 0; from < size; ++from) {
      EXPECT_TRUE(is_chunk(gathered[static_cast<size_t>(from)], from, 1)) << count;
      EXPECT_TRUE(is_chunk(taken[static_cast<size_t>(from)], from, rank)) << count;
      EXPECT_TRUE(rank != root || is_chunk(at_root[static_cast<size_t>(from)], from, 2)) << count;
    }
    const Tensor sum = chunk(9, 9);
    group.reduce_scatter(sum, given).wait();
    for (int64_t i = 0; i < count; i += 89) {
      int32_t expected = 0;
      for (int from = 0; from < size; ++from) expected += value(from, rank, i);
      EXPECT_EQ(sum.data<int32_t>()[i], expected) << count;
    }
  }
}

const std::string kBySlot = "all_reduce:0=slot,reduce:0=slot,broadcast:0=slot";
const std::string kNeverBySlot =
    "all_reduce:0=in_place,reduce:0=in_place,reduce_scatter:0=read,broadcast:0=read,all_gather:0=read,gather:0=read,"
    "scatter:0=read,all_to_all:0=read";

TEST(Algorithms, EveryWayOnOneHostGivesTheSame) {
  const auto body = [](Group& group) {
    expect_sums_in_order(group);
    expect_moves(group);
  };
  for (const std::string& table : {kBySlot, kNeverBySlot}) {
    setenv("CHORALE_ALGORITHMS", table.c_str(), 1);
    run_threads_and_processes(3, body);
  }
  unsetenv("CHORALE_ALGORITHMS");
}

TEST(Algorithms, RanksOfOneHostMayGoDifferentWays) {
  const int rank = std::atoi(config::env("CHORALE_TEST_RANK").value_or("0").c_str());
  setenv("CHORALE_ALGORITHMS", (rank % 2 == 0 ? kBySlot : kNeverBySlot).c_str(), 1);
  const auto body = [](Group& group) {
    expect_sums_in_order(group);
    expect_moves(group);
  };
  EXPECT_EQ(run_processes(3, body), (std::vector<int>{0, 0, 0}));
  unsetenv("CHORALE_ALGORITHMS");
}

}  // namespace
}  // namespace chorale::comm
