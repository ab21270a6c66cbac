// A rank of a job whose ranks are on different nodes: tests/hosts_test.py starts several with `chorale run`, pulls
// cables and slows links.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/world.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

void say(const Group& group, const std::string& text) {
  std::cout << concat("rank ", group.rank(), " says: ", text, "\n") << std::flush;
}

void check_moves(Group& group) {
  const int rank = group.rank(), size = group.size();
  for (int64_t count : {3, 50'000}) {
    const auto filled = [&](int64_t elems, int from) {
      const Tensor x = Tensor::empty({elems}, DType::kI32);
      std::fill_n(x.data<int32_t>(), elems, from);
      return x;
    };
    const Tensor all = filled(count * size, -1), word = filled(count, rank);
    group.all_gather_into(all, word).wait();
    for (int r = 0; r < size; ++r) ASSERT_EQ(all.data<int32_t>()[count * r + count - 1], r);
    group.broadcast(word, size - 1).wait();
    ASSERT_EQ(word.data<int32_t>()[count - 1], size - 1);
    const Tensor message = filled(count, -1), mine = filled(count, rank);
    const auto works = batch_isend_irecv(
        {P2POp::send(group, mine, (rank + 1) % size, 4), P2POp::recv(group, message, (rank + size - 1) % size, 4)});
    for (const Work& work : works) work.wait();
    ASSERT_EQ(message.data<int32_t>()[count - 1], (rank + size - 1) % size);
  }
  group.monitored_barrier(20s);
}

TEST(RankOnAHost, DISABLED_DoesWhatAllDo) {
  World world;
  world.init("env://");
  Group& group = world.group();
  expect_sums_in_order(group);
  check_moves(group);
  Group again = group.duplicate(), parity = group.split(group.rank() % 2);
  expect_sums_in_order(again);
  expect_sums_in_order(parity);
  say(group, concat("all is well over ", group.backend()));
}

// Large all-reduces until there were ALL_REDUCES of them, or one fails.
TEST(RankOnAHost, DISABLED_ReducesMuch) {
  World world;
  world.init("env://");
  Group& group = world.group();
  const int64_t bytes = std::stoll(config::env("REDUCE_BYTES").value());
  const int count = std::stoi(config::env("ALL_REDUCES").value());
  const Tensor x = Tensor::empty({bytes / 4}, DType::kF32);
  say(group, "connected");
  for (int i = 0; i < count; ++i) {
    std::fill_n(x.data<float>(), x.elems(), 1.0f);
    const auto start = Clock::now();
    try {
      group.all_reduce(x).wait();
    } catch (const CommError& error) {
      say(group, concat("after ", i, " all-reduces and ",
                        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count(),
                        " ms, because of rank ", error.failure().peer, ": ", error.what()));
      return;
    }
    ASSERT_EQ(x.data<float>()[x.elems() - 1], static_cast<float>(group.size()));
    say(group, concat("all-reduce ", i, " is done"));
  }
}

}  // namespace
}  // namespace chorale::comm
