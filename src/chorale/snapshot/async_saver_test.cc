#include "chorale/snapshot/async_saver.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <latch>
#include <set>

#include "chorale/api/api.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/io/safetensors.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

std::vector<float> saved_in(const std::filesystem::path& folder) {
  return read(folder).chunks.at(0).local.to_vector<float>();
}

// ---- Spares

std::set<std::string> files_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}
ino_t inode_of(const std::filesystem::path& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_ino;
}

TEST(Spares, ASaveWritesOverWhatTheOneBeforeItReplaced) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    Spares spares;
    // Longer ones and shorter ones; the checkpoint that is there stays what it is while the next one is written.
    for (const int64_t rows : {100, 4000, 300, 5000, 2, 4000}) {
      const bool must_fail = rows == 2;
      const Tensor x = full({rows}, static_cast<double>(rows + group.rank()));
      const State state{{{"x", {2 * rows}, {rows * group.rank()}, x}}, {}};
      if (must_fail) {
        const auto fails = [](Step step) {
          if (step == Step::kIndex) throw std::runtime_error("the power went off");
        };
        EXPECT_THROW(save(group, folder / "one", state, {.spares = &spares, .on_step = fails}), CheckpointError);
        continue;
      }
      save(group, folder / "one", state, {.spares = &spares});
      State loaded{{{"x", {2 * rows}, {rows * group.rank()}, full({rows}, -1)}}, {}};
      load(group, folder / "one", loaded);
      EXPECT_EQ(loaded.chunks[0].local.to_vector<float>(), x.to_vector<float>());
      if (group.rank() == 0) {
        EXPECT_TRUE(verify(folder / "one").empty());
      }
      group.barrier().wait();
    }
  });
  EXPECT_TRUE(verify(folder / "one").empty());
  EXPECT_EQ(files_in(folder / "one").size(), 3u) << "the index and two files; spares are gone with their owners";
}

TEST(Spares, AreTheSameFilesAgainUnlessSomebodyHasThem) {
  const TemporaryFolder folder;
  Spares spares;
  const auto save_as = [&](double value) {
    save(folder / "one", state_of({{"x", full({5000}, value)}}), {.spares = &spares});
    return folder / "one" / read_index(folder / "one").files.begin()->first;
  };
  const auto first = save_as(1);
  const ino_t inode = inode_of(first);
  save_as(2);
  ASSERT_EQ(spares.size(), 1u);
  const auto third = save_as(3);
  // Where the file system knows leases, as those of memory and of Linux's disks do.
  EXPECT_EQ(inode_of(third), inode);
  // Mapped by a reader, and under a second name: both stay what they were.
  const auto mapped = io::SafetensorsFile(third).load("x");
  const auto fourth = save_as(4);
  std::filesystem::create_hard_link(fourth, folder / "kept");
  EXPECT_NE(inode_of(save_as(5)), inode);
  save_as(6);
  EXPECT_EQ(mapped.to_vector<float>(), std::vector<float>(5000, 3));
  EXPECT_EQ(io::SafetensorsFile(folder / "kept").load("x").to_vector<float>(), std::vector<float>(5000, 4));
  EXPECT_EQ(saved_in(folder / "one"), std::vector<float>(5000, 6));
}

TEST(Spares, WhatAKilledProcessLeftGoesWithTheNextSave) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"x", full({3}, 1)}}));
  for (const char* name : {".spare-rank-0-1.safetensors", "rank-0-2.safetensors.tmp-77-1", "rank-1-3.safetensors"})
    folder.write(concat("one/", name), "left");
  folder.write("one/notes.txt", "mine");
  save(folder / "one", state_of({{"x", full({3}, 2)}}));
  EXPECT_EQ(files_in(folder / "one").size(), 3u);
  EXPECT_TRUE(files_in(folder / "one").contains("notes.txt"));
}

// ---- AsyncSaver

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
