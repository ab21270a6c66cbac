#include "chorale/train/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "chorale/base/error.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"
#include "chorale/train/checkpoint.h"
#include "chorale/train/options.h"

namespace chorale::train {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(RunFolder, OnlyAFolderOrNothingYetCanBeOne) {
  const TemporaryFolder folder;
  folder.write("file", "mine");
  fs::create_directory(folder / "there");
  fs::create_directory_symlink(folder / "there", folder / "link");
  fs::create_symlink(folder / "nowhere", folder / "dangling");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const char* name : {"there", "link", "new", "there/new/deeper", "new/"}) {
    EXPECT_NO_THROW(check_can_be_folder(folder / name)) << name;
  }
  for (const char* name : {"file", "file/below", "dangling", "pipe"}) {
    EXPECT_THAT(message_of([&] { check_can_be_folder(folder / name); }), HasSubstr("nothing was changed")) << name;
  }
  EXPECT_EQ(folder.read("file"), "mine");
}

TEST(RunFolder, OnlyWhatWasMadeAndIsEmptyIsRemoved) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "before");
  folder.write("file", "mine");
  {
    MadeFolders made;
    made.make(folder / "before");
    made.make(folder / "a/b/");
    EXPECT_TRUE(made.make_new(folder / "c/d"));
    EXPECT_FALSE(made.make_new(folder / "c/d"));
    EXPECT_FALSE(made.make_new(folder / "file"));
    EXPECT_THROW(made.make(folder / "file/x"), InvalidArgument);
    EXPECT_TRUE(fs::is_directory(folder / "a/b"));
    folder.write("c/d/result", "kept");
  }
  EXPECT_FALSE(fs::exists(folder / "a"));
  EXPECT_TRUE(fs::exists(folder / "before"));
  EXPECT_EQ(folder.read("c/d/result"), "kept");
  EXPECT_EQ(folder.read("file"), "mine");
}

TEST(RunLock, NamesItsOwnerToASecondOne) {
  const TemporaryFolder folder;
  {
    const RunLock mine(folder.path());
    const std::string message = message_of<StateError>([&] { RunLock(folder.path()); });
    EXPECT_THAT(message, HasSubstr(concat("a job is training in ", folder.path().string(), " already: process ",
                                          ::getpid(), " on ")));
    EXPECT_THAT(RunLock::owner(folder.path()), testing::StartsWith(concat("process ", ::getpid(), " on ")));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(RunLock, AFileThatAKilledProcessLeftIsNoLock) {
  const TemporaryFolder folder;
  folder.write(".lock", "process 1 on nowhere");
  EXPECT_EQ(RunLock::owner(folder.path()), "");
  EXPECT_NO_THROW(RunLock(folder.path()));
}

TEST(RunLock, IsNotWrittenThroughALink) {
  const TemporaryFolder folder;
  folder.write("victim", "mine");
  fs::create_directory(folder / "run");
  fs::create_symlink(folder / "victim", folder / "run/.lock");
  EXPECT_THROW(RunLock(folder / "run"), InvalidArgument);
  EXPECT_EQ(folder.read("victim"), "mine");
}

// A run whose checkpoint began with a batch of 8, seed 1 and 100 steps.
struct RunWithCheckpoint {
  TemporaryFolder folder;
  TrainOptions options;
  OptionTable table;

  RunWithCheckpoint() {
    list_options(options, table);
    const auto number = [](int64_t value) { return json::Value(value); };
    const Checkpoints checkpoints(folder.path());
    snapshot::save(checkpoints.begin(5), snapshot::state_of({{"x", Tensor::scalar(1, DType::kF32)}}));
    checkpoints.finish(
        {.step = 5, .data = "", .options = {{"batch", number(8)}, {"seed", number(1)}, {"steps", number(100)}}}, 3);
  }
  std::string read() {
    const auto found = options_of_run(folder.path(), table);
    if (!found) return "nothing";
    differences = found->differences;
    std::string text;
    for (const auto& [name, value] : found->values) text += concat(name, "=", value.size(name), " ");
    return text;
  }
  std::vector<std::string> differences;
};

TEST(RunOptions, OfTheCheckpointRuleAndDifferencesAreNamed) {
  RunWithCheckpoint run;
  run.folder.write("config.json", R"({"batch": 16, "seed": 1, "steps": 200})");
  EXPECT_EQ(run.read(), "batch=8 seed=1 steps=200 ");  // steps may change, and did
  EXPECT_THAT(run.differences, ElementsAre(HasSubstr("config.json says batch = 16, but it was 8; the run goes on with "
                                                     "what ")));
  EXPECT_THAT(run.differences[0], HasSubstr("step-00000005/manifest.json"));
}
TEST(RunOptions, AreThereWithoutConfigJson) {
  RunWithCheckpoint run;
  EXPECT_EQ(run.read(), "batch=8 seed=1 steps=100 ");
  EXPECT_THAT(run.differences, ElementsAre(HasSubstr("config.json is not there")));
  run.folder.write("config.json", "{\"batch\": ");
  EXPECT_EQ(run.read(), "batch=8 seed=1 steps=100 ");
  EXPECT_THAT(run.differences, ElementsAre(HasSubstr("config.json")));
}
TEST(RunOptions, WithoutACheckpointAreThoseOfConfigJson) {
  RunWithCheckpoint run;
  fs::remove_all(run.folder / "checkpoints");
  EXPECT_EQ(run.read(), "nothing");
  run.folder.write("config.json", R"({"batch": 16})");
  EXPECT_EQ(run.read(), "batch=16 ");
}

}  // namespace
}  // namespace chorale::train
