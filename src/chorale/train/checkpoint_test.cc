#include "chorale/train/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/io/file.h"
#include "chorale/io/safetensors.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::train {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

Tensor numbers(float first) { return Tensor::from(std::vector<float>{first, first + 1}, {2}); }

void save(const Checkpoints& checkpoints, int64_t step, int64_t keep = 3) {
  const auto value = static_cast<float>(step);
  const fs::path folder = checkpoints.begin(step);
  io::write_file(folder / "vocab.txt", "a\nb\n");
  snapshot::save(folder, snapshot::state_of({{"weight", numbers(3)}, {"optimizer/lr", numbers(value)}}));
  checkpoints.finish({.step = step, .data = "some data", .options = {{"batch", json::Value(int64_t{8})}}}, keep);
}
// The file of tensors in a checkpoint.
fs::path tensors_in(const fs::path& folder) { return folder / snapshot::read_index(folder).files.begin()->first; }
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
  const snapshot::State state = snapshot::read(found->folder, "optimizer/");
  ASSERT_EQ(state.chunks.size(), 1u);
  EXPECT_EQ(state.chunks[0].local.to_vector<float>(), (std::vector<float>{12, 13}));
  const NamedTensors model = model_tensors(found->folder);
  ASSERT_EQ(model.size(), 1u);
  EXPECT_EQ(model[0].first, "weight");
  EXPECT_EQ(model[0].second.to_vector<float>(), (std::vector<float>{3, 4}));
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
  folder.write("checkpoints/.step-00000006.new/rank-0-1.safetensors", "half");
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
  for (const char* name : {"", "index.json", "vocab.txt", "manifest.json"}) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    const Checkpoints checkpoints(folder.path());
    save(checkpoints, 1);
    save(checkpoints, 2);
    const fs::path last = folder / "checkpoints/step-00000002", damaged = *name ? last / name : tensors_in(last);
    const auto bytes = static_cast<std::streamoff>(fs::file_size(damaged));
    flip_byte(damaged, *name ? bytes / 2 : bytes - 6);
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
  const fs::path model = tensors_in(folder / "checkpoints/step-00000001");
  fs::resize_file(model, fs::file_size(model) - 1);
  EXPECT_THAT(message_of([&] { find_checkpoint(checkpoints, true); }),
              HasSubstr(model.string() + " is damaged: it has "));
  fs::remove(model);
  EXPECT_THAT(message_of([&] { find_checkpoint(checkpoints, true); }), HasSubstr(model.string()));
}

}  // namespace
}  // namespace chorale::train
