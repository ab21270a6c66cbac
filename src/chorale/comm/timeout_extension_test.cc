#include "chorale/comm/timeout_extension.h"

#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/tensor/tensor.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

TEST(TimeoutExtension, AddsUpAndEndsWithTheFirstCallThatHasIt) {
  run_ranks(2, [](Group& group) {
    extend_timeouts(10s);
    extend_timeouts(5s);
    EXPECT_EQ(timeout_extension(), 15s);
    group.barrier({.timeout = 3s}).wait();  // has a timeout of its own
    EXPECT_EQ(timeout_extension(), 15s);
    group.barrier().wait();
    EXPECT_EQ(timeout_extension(), 0s);
    extend_timeouts(5s);
    EXPECT_EQ(timeout_extension(), 5s);
    group.barrier().wait();
    EXPECT_EQ(timeout_extension(), 0s);
    EXPECT_THROW(extend_timeouts(-1s), InvalidArgument);
  });
}

// The one that was made before the other was done does not end a later extension.
TEST(TimeoutExtension, BelongsToTheCallsThatWereMadeWithIt) {
  run_ranks(2, [](Group& group) {
    const Tensor a = Tensor::from<float>({1}, {1}), b = Tensor::from<float>({1}, {1});
    extend_timeouts(10s);
    const Work first = group.all_reduce(a), second = group.all_reduce(b);
    first.wait();
    extend_timeouts(7s);
    second.wait();
    EXPECT_EQ(timeout_extension(), 7s);
    group.barrier().wait();
    EXPECT_EQ(timeout_extension(), 0s);
  });
}

// A small message is done before anybody has come.
TEST(TimeoutExtension, IsLeftAloneByMessages) {
  run_ranks(2, [](Group& group) {
    const Tensor x = Tensor::from<float>({1}, {1});
    extend_timeouts(10s);
    (group.rank() == 0 ? group.isend(x, 1) : group.irecv(x, 0)).wait();
    EXPECT_EQ(timeout_extension(), 10s);
    group.barrier().wait();
    EXPECT_EQ(timeout_extension(), 0s);
  });
}

// A rank comes late; one that has extended its timeout waits for it.
TEST(TimeoutExtension, LetsARankComeLate) {
  run_ranks(2,
            [](Group& group) {
              if (group.rank() == 1) std::this_thread::sleep_for(1500ms);
              if (group.rank() == 0) extend_timeouts(60s);
              EXPECT_NO_THROW(group.barrier().wait());
            },
            {.timeout = 500ms});
}

// The other one comes when this one has given up.
TEST(TimeoutExtension, WithoutItALateRankIsNotAwaited) {
  std::latch gave_up(1);
  run_ranks(2,
            [&](Group& group) {
              if (group.rank() == 1) gave_up.wait();
              EXPECT_THROW(group.barrier().wait(), CommError);
              if (group.rank() == 0) gave_up.count_down();
            },
            {.timeout = 500ms});
}

}  // namespace
}  // namespace chorale::comm
