#include "chorale/snapshot/async_saver.h"

#include <gtest/gtest.h>

#include <latch>

#include "chorale/api/api.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

std::vector<float> saved_in(const std::filesystem::path& folder) {
  return read(folder).chunks.at(0).local.to_vector<float>();
}

TEST(AsyncSaver, WhatHappensAfterStartDoesNotCount) {
  const TemporaryFolder folder;
  const Tensor x = full({3}, 1);
  AsyncSaver saver;
  // Nothing is written before the tensor has changed.
  std::latch changed(1);
  saver.start(folder / "one", state_of({{"x", x}}), {.on_step = [&](Step step) {
                if (step == Step::kPrepare) changed.wait();
              }});
  fill_(x, 2);
  EXPECT_FALSE(has_checkpoint(folder / "one"));
  changed.count_down();
  saver.wait();
  EXPECT_EQ(saved_in(folder / "one"), (std::vector<float>{1, 1, 1}));
}

TEST(AsyncSaver, SavesFollowEachOther) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    AsyncSaver saver(group);
    const Tensor x = full({3}, 0);
    for (int i = 0; i < 4; ++i) {
      fill_(x, i);
      saver.start(folder / std::to_string(i), state_of({{"x", x}}));
      group.barrier().wait();  // other calls go on meanwhile
    }
    saver.wait();
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(saved_in(folder / std::to_string(i)), std::vector<float>(3, static_cast<float>(i)));
  });
}

// spec: test_checkpoint_save_failure_continues_serving
TEST(AsyncSaver, AfterAFailureTheNextSaveSucceeds) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    AsyncSaver saver(group);
    const State state = state_of({{"x", full({3}, 5)}});
    const auto fail = [rank = group.rank()](Step step) {
      if (step == Step::kWrite && rank == 1) throw std::runtime_error("no space");
    };
    saver.start(folder / "bad", state, {.on_step = fail});
    EXPECT_EQ(message_of<CheckpointError>([&] { saver.start(folder / "good", state); }),
              "[checkpoint] writing failed on rank 1; rank 1: no space");
    saver.start(folder / "good", state);
    saver.wait();
    saver.wait();
  });
  EXPECT_FALSE(has_checkpoint(folder / "bad"));
  EXPECT_EQ(saved_in(folder / "good"), (std::vector<float>{5, 5, 5}));
}

}  // namespace
}  // namespace chorale::snapshot
