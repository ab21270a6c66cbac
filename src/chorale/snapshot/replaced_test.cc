#include "chorale/snapshot/replaced.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "chorale/api/api.h"
#include "chorale/base/host.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/io/safetensors.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}
int spares_in(const std::filesystem::path& folder) {
  int count = 0;
  for (const std::string& name : names_in(folder)) count += name.starts_with(Leftovers::kSpare) ? 1 : 0;
  return count;
}
ino_t inode_of(const std::filesystem::path& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_ino;
}
// Whether its file system says that nobody else has a file open, without which none is written over.
bool knows_leases(const std::filesystem::path& file) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
  const bool knows = ::fcntl(descriptor, F_SETLEASE, F_WRLCK) == 0;
  ::close(descriptor);
  return knows;
}
// Saves one tensor of a single process; the file that has it.
std::filesystem::path save_value(const std::filesystem::path& folder, double value, Replaced replaced) {
  save(folder, state_of({{"x", full({5000}, value)}}), {.replaced = replaced});
  return folder / read_index(folder).files.begin()->first;
}

TEST(Replaced, ASaveWritesOverWhatTheOneBeforeItReplaced) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    // Longer ones and shorter ones; the checkpoint that is there stays what it is while the next one is written.
    for (const int64_t rows : {100, 4000, 300, 5000, 2, 4000}) {
      const bool must_fail = rows == 2;
      const Tensor x = full({rows}, static_cast<double>(rows + group.rank()));
      const State state{{{"x", {2 * rows}, {rows * group.rank()}, x}}, {}};
      if (must_fail) {
        const auto fails = [](Step step) {
          if (step == Step::kIndex) throw std::runtime_error("the power went off");
        };
        EXPECT_THROW(save(group, folder / "one", state, {.replaced = Replaced::kKept, .on_step = fails}),
                     CheckpointError);
        continue;
      }
      save(group, folder / "one", state, {.replaced = Replaced::kKept});
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
  EXPECT_EQ(names_in(folder / "one").size(), 5u) << "the index, two files, and one to write over for each rank";
  EXPECT_EQ(spares_in(folder / "one"), 2);
  // Fewer ranks take what there is, and leave nothing that nobody would take.
  save_value(folder / "one", 1, Replaced::kKept);
  EXPECT_EQ(spares_in(folder / "one"), 1);
  save_value(folder / "one", 2, Replaced::kRemoved);
  EXPECT_EQ(names_in(folder / "one").size(), 2u);
}

TEST(Replaced, AreTheSameFilesAgainUnlessSomebodyHasThem) {
  const TemporaryFolder folder;
  const auto save_as = [&](double value) { return save_value(folder / "one", value, Replaced::kKept); };
  const ino_t inode = inode_of(save_as(1));
  save_as(2);
  ASSERT_EQ(spares_in(folder / "one"), 1);
  const auto third = save_as(3);
  // File systems of memory and of Linux's disks know leases, some of networks do not.
  if (knows_leases(third)) {
    EXPECT_EQ(inode_of(third), inode);
  }
  // Mapped by a reader, and under a second name: both stay what they were.
  const auto mapped = io::SafetensorsFile(third).load("x");
  const auto fourth = save_as(4);
  std::filesystem::create_hard_link(fourth, folder / "kept");
  EXPECT_NE(inode_of(save_as(5)), inode);
  save_as(6);
  EXPECT_EQ(mapped.to_vector<float>(), std::vector<float>(5000, 3));
  EXPECT_EQ(io::SafetensorsFile(folder / "kept").load("x").to_vector<float>(), std::vector<float>(5000, 4));
  EXPECT_EQ(read(folder / "one").chunks.at(0).local.to_vector<float>(), std::vector<float>(5000, 6));
}

TEST(Replaced, WhatAKilledProcessLeftGoesWithTheNextSave) {
  const TemporaryFolder folder;
  save_value(folder / "one", 1, Replaced::kRemoved);
  for (const char* name : {".spare-rank-0-1.safetensors", "rank-0-2.safetensors.tmp-77-1", "rank-1-3.safetensors",
                           ".spare-rank-0-1.safetensors.tmp-3-4", ".saving-5"})
    folder.write(concat("one/", name), "left");
  for (const char* name : {"notes.txt", "rank-best.safetensors", ".spare-rank-.safetensors"})
    folder.write(concat("one/", name), "mine");
  save_value(folder / "one", 2, Replaced::kRemoved);
  EXPECT_EQ(names_in(folder / "one").size(), 5u);
  for (const char* name : {"notes.txt", "rank-best.safetensors", ".spare-rank-.safetensors"})
    EXPECT_TRUE(names_in(folder / "one").contains(name)) << name;
}

TEST(Replaced, AreKeptByDefaultWhereFilesAreMemoryAndThereIsPlenty) {
  const std::filesystem::path memory = "/dev/shm";
  if (::access(memory.c_str(), W_OK) != 0) GTEST_SKIP() << "there is no /dev/shm to write to";
  const std::filesystem::path folder = memory / concat("chorale-replaced-test-", ::getpid());
  const bool has_plenty = has_memory_for(memory, 4 * 5000);
  for (const double value : {1, 2, 3}) save_value(folder, value, Replaced::kAuto);
  EXPECT_EQ(spares_in(folder), has_plenty ? 1 : 0);
  std::filesystem::remove_all(folder);

  EXPECT_FALSE(has_memory_for(memory, memory_room().free_bytes / 3)) << "a quarter of what is free is the most";
  EXPECT_FALSE(has_memory_for("/proc", 1));
  EXPECT_FALSE(has_memory_for(memory / "nothing of this name", 1));
}

}  // namespace
}  // namespace chorale::snapshot
