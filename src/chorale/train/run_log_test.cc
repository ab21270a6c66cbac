#include "chorale/train/run_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::train {
namespace {

// "kind step" of each line.
std::vector<std::string> lines(const TemporaryFolder& folder) {
  std::vector<std::string> found;
  std::istringstream text(folder.read("metrics.jsonl"));
  for (std::string line; std::getline(text, line);) {
    const json::Value value = json::parse("a line", line);
    const json::Object& object = value.object("a line");
    found.push_back(json::find(object, "kind")->string("kind") + " " +
                    std::to_string(json::find(object, "step")->size("step")));
  }
  return found;
}

TEST(RunLog, ARunThatGoesOnDropsWhatItWillDoAgain) {
  const TemporaryFolder folder;
  {
    RunLog log(folder.path(), 0, {});
    log.numbers("train", 10, {{"loss", 1.5}});
    log.numbers("evaluation", 10, {{"test_loss", 2}});
    log.numbers("train", 20, {{"loss", 1.25}});
  }
  folder.write("metrics.jsonl", folder.read("metrics.jsonl") + "{\"kind\": \"tr");  // killed while it wrote
  RunLog log(folder.path(), 10, {{"ranks", json::Value(int64_t{2})}});
  log.rank(11, 1, {{"compute_ms", 2.5}});
  log.sample(11, "a text\nof two lines");
  EXPECT_EQ(lines(folder),
            (std::vector<std::string>{"start 0", "train 10", "evaluation 10", "start 10", "time 11", "sample 11"}));
  EXPECT_THAT(folder.read("metrics.jsonl"), testing::HasSubstr("\"loss\": 1.5}"));
  EXPECT_THAT(folder.read("metrics.jsonl"), testing::HasSubstr("\"ranks\": 2"));
  EXPECT_THAT(folder.read("metrics.jsonl"), testing::HasSubstr("\"rank\": 1, \"compute_ms\": 2.5}"));
}

TEST(RunLog, DamagedLinesAreCutOffAndSaid) {
  const TemporaryFolder folder;
  {
    RunLog log(folder.path(), 0, {});
    log.numbers("train", 10, {{"loss", 1.5}});
  }
  const std::string whole = folder.read("metrics.jsonl");
  // A line that a full disk cut, with another one behind it, and one that does not end.
  folder.write("metrics.jsonl", whole + "{\"kind\": \"tr{\"kind\": \"train\", \"step\": 12}\n{\"kind\"");
  testing::internal::CaptureStderr();
  { RunLog log(folder.path(), 20, {}); }
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr("metrics.jsonl had 2 damaged lines, cut off at byte " + std::to_string(whole.size())));
  EXPECT_EQ(lines(folder), (std::vector<std::string>{"start 0", "train 10", "start 20"}));
}

}  // namespace
}  // namespace chorale::train
