#include "chorale/train/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::train {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

Tensor numbers(float first) { return Tensor::from(std::vector<float>{first, first + 1}, {2}); }

void save(const Checkpoints& checkpoints, int64_t step, int64_t keep = 3) {
  const auto value = static_cast<float>(step);
  checkpoints.save(
      {.step = step,
       .data = "some data",
       .options = {{"batch", json::Value(int64_t{8})}},
       .random = {{~uint64_t{0}, 5}, {7, 0}},
       .training = {{"optimizer/lr", numbers(value)}},
       .of_ranks = {{{"error", numbers(1)}}, {{"error", numbers(2)}}}},
      [](const fs::path& folder) {
        io::save(folder / "model.safetensors", {{"weight", numbers(3)}});
      },
      keep);
}
std::vector<std::string> names(const Checkpoints& checkpoints) {
  std::vector<std::string> found;
  for (const fs::path& path : checkpoints.list()) found.push_back(path.filename().string());
  return found;
}
void flip_byte(const fs::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(at);
  file.put(byte);
}

TEST(Checkpoint, WhatWasSavedIsLoaded) {
  const TemporaryFolder folder;
  const Checkpoints checkpoints(folder.path());
  EXPECT_FALSE(find_checkpoint(checkpoints, false));
  save(checkpoints, 12);
  const auto found = find_checkpoint(checkpoints, false);
  ASSERT_TRUE(found);
  const Checkpoint& c = found->checkpoint;
  EXPECT_EQ(c.step, 12);
  EXPECT_EQ(c.data, "some data");
  EXPECT_EQ(json::find(c.options, "batch")->size("batch"), 8);
  EXPECT_EQ(c.random, (std::vector<RandomStream>{{~uint64_t{0}, 5}, {7, 0}}));
  ASSERT_EQ(c.training.size(), 1u);
  EXPECT_EQ(c.training[0].second.to_vector<float>(), (std::vector<float>{12, 13}));
  ASSERT_EQ(c.of_ranks.size(), 2u);
  EXPECT_EQ(c.of_ranks[1][0].second.to_vector<float>(), (std::vector<float>{2, 3}));
  EXPECT_TRUE(fs::exists(found->folder / "model.safetensors"));
}
TEST(Checkpoint, TheLastOnesAreKept) {
  const TemporaryFolder folder;
  const Checkpoints checkpoints(folder.path());
  for (const int64_t step : {9, 10, 100'000'000}) save(checkpoints, step, 2);
  EXPECT_EQ(names(checkpoints), (std::vector<std::string>{"step-00000010", "step-100000000"}));
  EXPECT_EQ(find_checkpoint(checkpoints, false)->checkpoint.step, 100'000'000);
}
TEST(Checkpoint, LeftoversOfAKilledProcessAreNotCheckpointsAndAreRemoved) {
  const TemporaryFolder folder;
  save(Checkpoints(folder.path()), 5);
  fs::create_directory(folder / "checkpoints/.step-00000006.new");
  folder.write("checkpoints/.step-00000006.new/model.safetensors", "half");
  const Checkpoints checkpoints(folder.path());
  EXPECT_EQ(find_checkpoint(checkpoints, false)->checkpoint.step, 5);
  EXPECT_TRUE(fs::exists(folder / "checkpoints/.step-00000006.new")) << "a process that only reads removes nothing";
  checkpoints.remove_unfinished();
  EXPECT_FALSE(fs::exists(folder / "checkpoints/.step-00000006.new"));
}
TEST(Checkpoint, WhatIsNotACheckpointOfTheRunStays) {
  const TemporaryFolder folder;
  const Checkpoints checkpoints(folder.path());
  save(checkpoints, 5);
  fs::copy(folder / "checkpoints/step-00000005", folder / "checkpoints/step-00000005-best",
           fs::copy_options::recursive);
  folder.write("checkpoints/.step-notes", "mine");
  checkpoints.remove_unfinished();
  for (const int64_t step : {6, 7, 8}) save(checkpoints, step, 1);
  EXPECT_EQ(names(checkpoints), (std::vector<std::string>{"step-00000008"}));
  EXPECT_TRUE(fs::exists(folder / "checkpoints/step-00000005-best/manifest.json"));
  EXPECT_EQ(folder.read("checkpoints/.step-notes"), "mine");
}
TEST(Checkpoint, OneWhoseFolderIsAFileIsAnError) {
  const TemporaryFolder folder;
  folder.write("checkpoints", "a file");
  EXPECT_THAT(message_of([&] { Checkpoints(folder.path()); }), HasSubstr("should be a folder, but is something else"));
}
TEST(Checkpoint, ADamagedFileIsNamedAndTheOneBeforeUsedOnlyWhenAsked) {
  for (const char* name : {"model.safetensors", "training.safetensors", "rank-1.safetensors", "manifest.json"}) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    const Checkpoints checkpoints(folder.path());
    save(checkpoints, 1);
    save(checkpoints, 2);
    const fs::path damaged = folder / "checkpoints/step-00000002" / name;
    flip_byte(damaged, static_cast<std::streamoff>(fs::file_size(damaged) / 2));
    const std::string error = message_of([&] { find_checkpoint(checkpoints, false); });
    EXPECT_THAT(error, HasSubstr(damaged.string() + " is damaged"));
    EXPECT_THAT(error, HasSubstr("step-00000001, is used only when asked: --resume-previous"));
    EXPECT_EQ(find_checkpoint(checkpoints, true)->checkpoint.step, 1);
  }
}
TEST(Checkpoint, AFileThatIsCutOffOrMissingIsNamed) {
  const TemporaryFolder folder;
  const Checkpoints checkpoints(folder.path());
  save(checkpoints, 1);
  const fs::path model = folder / "checkpoints/step-00000001/model.safetensors";
  fs::resize_file(model, fs::file_size(model) - 1);
  EXPECT_THAT(message_of([&] { find_checkpoint(checkpoints, true); }),
              HasSubstr(model.string() + " is damaged: it has "));
  fs::remove(model);
  EXPECT_THAT(message_of([&] { find_checkpoint(checkpoints, true); }), HasSubstr(model.string()));
}

}  // namespace
}  // namespace chorale::train
