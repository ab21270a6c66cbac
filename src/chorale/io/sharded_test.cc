#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "chorale/base/error.h"
#include "chorale/io/safetensors.h"
#include "chorale/io/sharded.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

using testing::HasSubstr;

// Tensor i has 100 bytes, and i as its elements.
NamedTensors tensors_of_100_bytes(int count) {
  NamedTensors result;
  for (int i = 0; i < count; ++i) {
    result.emplace_back("t" + std::to_string(i), Tensor::from(std::vector<float>(25, static_cast<float>(i)), {25}));
  }
  return result;
}

std::set<std::string> files_in(const TemporaryFolder& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

void expect_loads(const std::filesystem::path& path, int count) {
  const Checkpoint loaded = load(path);
  ASSERT_EQ(loaded.tensors.size(), static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(loaded.tensors[static_cast<size_t>(i)].first, "t" + std::to_string(i));
    EXPECT_EQ(loaded.tensors[static_cast<size_t>(i)].second.to_vector<int>(), std::vector<int>(25, i));
  }
}

std::string error_of(const std::filesystem::path& path) {
  return message_of([&] { load(path); });
}

TEST(Sharded, CutsBetweenTensorsAndReadsBackInOrder) {
  const TemporaryFolder folder;
  save_sharded(folder.path(), tensors_of_100_bytes(5), 250, {{"note", "n"}});
  EXPECT_EQ(files_in(folder),
            (std::set<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                   "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  expect_loads(folder.path(), 5);
  expect_loads(folder / "model.safetensors.index.json", 5);
  EXPECT_EQ(load(folder.path()).metadata, (Metadata{{"note", "n"}}));
  EXPECT_EQ(SafetensorsFile(folder / "model-00002-of-00003.safetensors").entries().size(), 2u);
}

TEST(Sharded, WritesTheIndexThatTheHuggingFaceLibrariesRead) {
  const TemporaryFolder folder;
  save_sharded(folder.path(), tensors_of_100_bytes(2), 100);
  EXPECT_EQ(folder.read("model.safetensors.index.json"), R"({
  "metadata": {
    "total_size": 200
  },
  "weight_map": {
    "t0": "model-00001-of-00002.safetensors",
    "t1": "model-00002-of-00002.safetensors"
  }
}
)");
}

TEST(Sharded, GivesALargeTensorAShardOfItsOwn) {
  const TemporaryFolder folder;
  save_sharded(folder.path(), tensors_of_100_bytes(3), 1);
  EXPECT_EQ(files_in(folder).size(), 4u);
  expect_loads(folder.path(), 3);
}

TEST(Sharded, IsOneFileWhenItFits) {
  const TemporaryFolder folder;
  save_sharded(folder / "made", tensors_of_100_bytes(2), 200);
  EXPECT_TRUE(std::filesystem::exists(folder / "made" / "model.safetensors"));
  expect_loads(folder / "made", 2);
}

TEST(Sharded, RemovesWhatAnEarlierCallLeft) {
  const TemporaryFolder folder;
  folder.write("config.json", "{}");
  save_sharded(folder.path(), tensors_of_100_bytes(4), 100);
  save_sharded(folder.path(), tensors_of_100_bytes(3), 100);
  expect_loads(folder.path(), 3);
  EXPECT_EQ(files_in(folder).size(), 5u);
  save_sharded(folder.path(), tensors_of_100_bytes(2), 1000);
  expect_loads(folder.path(), 2);
  EXPECT_EQ(files_in(folder), (std::set<std::string>{"config.json", "model.safetensors"}));
  save_sharded(folder.path(), tensors_of_100_bytes(2), 100);
  expect_loads(folder.path(), 2);
  EXPECT_EQ(files_in(folder).size(), 4u);
}

TEST(Sharded, RefusesDuplicateNamesAcrossShards) {
  const TemporaryFolder folder;
  const Tensor x = tensors_of_100_bytes(1)[0].second;
  EXPECT_THROW(save_sharded(folder.path(), {{"x", x}, {"x", x}}, 100), InvalidArgument);
  EXPECT_TRUE(files_in(folder).empty());
}

TEST(Sharded, RefusesAnIndexThatLies) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(folder.path()), HasSubstr("has neither model.safetensors nor model.safetensors.index.json"));
  save_sharded(folder.path(), tensors_of_100_bytes(2), 100);
  const auto with_map = [&](const std::string& map) {
    return error_of(folder.write("model.safetensors.index.json", "{\"weight_map\": " + map + "}"));
  };
  const std::string first = "\"model-00001-of-00002.safetensors\"", second = "\"model-00002-of-00002.safetensors\"";
  EXPECT_EQ(with_map("{\"t0\": " + first + ", \"t1\": " + second + "}"), "");
  EXPECT_THAT(with_map("{\"t1\": " + first + ", \"t0\": " + second + "}"), HasSubstr("has no tensor \"t1\""));
  EXPECT_THAT(with_map("{\"t0\": \"none\"}"), HasSubstr("No such file"));
  EXPECT_THAT(with_map("{\"t0\": \"../x\"}"), HasSubstr("not a plain file name"));
  EXPECT_THAT(with_map("{\"t0\": \"/etc/passwd\"}"), HasSubstr("not a plain file name"));
  EXPECT_THAT(with_map("{\"t0\": \"a\\u0000b\"}"), HasSubstr("not a plain file name"));
  EXPECT_THAT(with_map("[]"), HasSubstr("weight_map should be an object"));
  EXPECT_THAT(error_of(folder.write("model.safetensors.index.json", "{}")), HasSubstr("has no \"weight_map\""));
  save(folder / "model-00001-of-00002.safetensors", tensors_of_100_bytes(2));
  EXPECT_THAT(with_map("{\"t0\": " + first + "}"), HasSubstr("lists 1 tensors, but its shards hold 2"));
}

}  // namespace
}  // namespace chorale::io
