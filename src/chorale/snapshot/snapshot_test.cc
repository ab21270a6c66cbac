#include "chorale/snapshot/snapshot.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "chorale/api/api.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/io/safetensors.h"
#include "chorale/snapshot/snapshot_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

namespace fs = std::filesystem;

// spec: test_no_dist, test_save_load_bytes
TEST(Checkpoint, OneProcessNeedsNoGroup) {
  const TemporaryFolder folder;
  State state = state_of({{"a", numbered({3, 2})}, {"b", numbered({}, 5)}}, "model.");
  state.bytes["step"] = std::string("12\0\xff", 4);
  save(folder / "one", state);
  State other = state_of({{"a", full({3, 2}, 0)}, {"b", full({}, 0)}}, "model.");
  const Tensor kept = other.chunks[0].local;
  other.bytes["step"] = "";
  load(folder / "one", other);
  EXPECT_TRUE(other.chunks[0].local.is(kept)) << "loads in place";
  EXPECT_EQ(kept.to_vector<float>(), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(other.chunks[1].local.item<float>(), 5);
  EXPECT_EQ(other.bytes["step"], std::string("12\0\xff", 4));
  EXPECT_TRUE(verify(folder / "one").empty());
}

TEST(Checkpoint, FilesAreOrdinarySafetensors) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"a", numbered({3, 2})}}));
  const Index index = read_index(folder / "one");
  ASSERT_EQ(index.files.size(), 1u);
  const io::SafetensorsFile file(folder / "one" / index.files.begin()->first);
  EXPECT_EQ(file.load("a").to_vector<float>(), (std::vector<float>{0, 1, 2, 3, 4, 5}));
}

TEST(Checkpoint, AViewIsSavedWithoutTheRestOfItsMemory) {
  const TemporaryFolder folder;
  const Tensor large = numbered({1000, 4});
  save(folder / "one", state_of({{"column", narrow(large, 1, 2, 1)}, {"row", narrow(large, 0, 7, 1)}}));
  EXPECT_LT(read_index(folder / "one").files.begin()->second, 6000);
  State state = state_of({{"column", full({1000, 1}, 0)}, {"row", full({1, 4}, 0)}});
  load(folder / "one", state);
  EXPECT_EQ(state.chunks[0].local.to_vector<float>()[999], 3998);
  EXPECT_EQ(state.chunks[1].local.to_vector<float>(), (std::vector<float>{28, 29, 30, 31}));
}

TEST(Checkpoint, ValuesAreConvertedToTheDtypeThatIsThere) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"a", numbered({4})}}));
  State state = state_of({{"a", full({4}, 0, DType::kF64)}});
  load(folder / "one", state);
  EXPECT_EQ(state.chunks[0].local.to_vector<double>(), (std::vector<double>{0, 1, 2, 3}));
}

// spec: TestLoadPlanner.test_strict, test_partial_load
TEST(Checkpoint, AMissingKeyIsAnErrorUnlessALoadMayBePartial) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"net.weight", numbered({2})}, {"net.bias", numbered({2})}}));
  State state = state_of({{"net.weight", full({2}, -1)}, {"net.wieght", full({2}, -1)}});
  const std::string message = message_of<CheckpointError>([&] { load(folder / "one", state); });
  EXPECT_NE(message.find("has no net.wieght"), std::string::npos) << message;
  EXPECT_EQ(state.chunks[0].local.to_vector<float>(), (std::vector<float>{-1, -1})) << "nothing was written";
  load(folder / "one", state, {.partial = true});
  EXPECT_EQ(state.chunks[0].local.to_vector<float>(), (std::vector<float>{0, 1}));
  EXPECT_EQ(state.chunks[1].local.to_vector<float>(), (std::vector<float>{-1, -1}));
  // What the checkpoint has beyond that is ignored; a part of it is chosen by prefix.
  const State weights = read(folder / "one", "net.w");
  ASSERT_EQ(weights.chunks.size(), 1u);
  EXPECT_EQ(weights.chunks[0].key, "net.weight");
}

// spec: test_overwrite
TEST(Checkpoint, OverwritingReplacesAndLeavesNothingBehind) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"a", numbered({4})}}));
  EXPECT_NE(message_of<CheckpointError>([&] {
              save(folder / "one", state_of({{"a", numbered({4}, 9)}}), {.overwrite = false});
            }).find("has a checkpoint already"),
            std::string::npos);
  save(folder / "one", state_of({{"a", numbered({4}, 9)}}), {.replaced = Replaced::kRemoved});
  EXPECT_EQ(read(folder / "one").chunks[0].local.to_vector<float>()[0], 9);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "one"), {}), 2) << "the index and one file";
}

// Each rank has a folder of its own, as on hosts with disks of their own: the coordinator's gets everything, and rank 0
// reads it for all.
TEST(Checkpoint, RanksThatDoNotSeeTheFolderSendAndAreSentTheirParts) {
  for (const int coordinator : {0, 2}) {
    const TemporaryFolder folder;
    const Tensor x = numbered({7, 3}), y = numbered({4}, 50);
    comm::run_ranks(3, [&](comm::Group& group) {
      const bool sees = group.rank() == coordinator || group.rank() == 1;
      State state{{chunk_of("x", x, shard(x.sizes(), 0, 3, group.rank())), chunk_of("y", y, whole_of(y.sizes()))}, {}};
      state.bytes[concat("of ", group.rank())] = concat("I am ", group.rank());
      save(group, folder / (sees ? "shared" : "elsewhere"), state, {.coordinator = coordinator});
      const auto made = fs::exists(folder / "elsewhere");
      EXPECT_FALSE(made) << "only the coordinator makes a folder";
    });
    EXPECT_TRUE(verify(folder / "shared").empty());
    for (const auto& [name, bytes] : read_index(folder / "shared").files)
      EXPECT_FALSE(name.starts_with(coordinator == 0 ? "rank-2" : "rank-0")) << name;
    EXPECT_FALSE(fs::exists(folder / "elsewhere"));
    comm::run_ranks(3, [&](comm::Group& group) {
      State state{{empty_chunk("x", x.sizes(), shard(x.sizes(), 1, 3, group.rank())),
                   empty_chunk("y", y.sizes(), whole_of(y.sizes()))},
                  {}};
      const int other = (group.rank() + 1) % 3;
      state.bytes[concat("of ", other)] = "?";
      load(group, folder / (group.rank() < 2 ? "shared" : "elsewhere"), state);
      expect_part(state.chunks[0], x);
      expect_part(state.chunks[1], y);
      EXPECT_EQ(state.bytes.begin()->second, concat("I am ", other));
    });
  }
}

TEST(Checkpoint, PlainFilesLoadAsACheckpointDoes) {
  const TemporaryFolder folder;
  const Tensor x = numbered({6, 2}), lr = numbered({}, 3);
  fs::create_directory(folder / "old");
  io::save(folder / "old/model-00001-of-00002.safetensors", {{"x", x}});
  io::save(folder / "old/model-00002-of-00002.safetensors", {{"z", numbered({2})}});
  io::save(folder / "old/training.safetensors", {{"optimizer/lr", lr}});
  for (const int rank : {0, 1})
    io::save(folder / concat("old/rank-", rank, ".safetensors"), {{"error", numbered({2}, rank)}});
  folder.write("old/notes.safetensors", "none of ours");
  comm::run_ranks(2, [&](comm::Group& group) {
    const std::string own = concat("rank-", group.rank(), "/error");
    State state{{empty_chunk("x", x.sizes(), shard(x.sizes(), 0, 2, group.rank())),
                 empty_chunk("optimizer/lr", {}, whole_of({})), empty_chunk(own, {2}, whole_of({2}))},
                {}};
    load(group, folder / "old", state);
    expect_part(state.chunks[0], x);
    expect_part(state.chunks[1], lr);
    expect_part(state.chunks[2], numbered({2}, group.rank()));
  });
  EXPECT_EQ(read(folder / "old").chunks.size(), 5u);
  // What a save that did not end left is no checkpoint.
  fs::create_directory(folder / "half");
  io::save(folder / "half/rank-0-17.safetensors", {{"x", x}});
  EXPECT_THROW(read(folder / "half"), InvalidArgument);
}

// spec: test_read_write_shard_tensor, test_read_write_only_tensor
TEST(Checkpoint, EveryRankWritesItsPartsWithAnyNumberOfThreads) {
  for (const int threads : {1, 2}) {
    const TemporaryFolder folder;
    const Tensor x = numbered({10, 3}), y = numbered({6}, 100);
    comm::run_ranks(3, [&](comm::Group& group) {
      const Region region = shard(x.sizes(), 0, 3, group.rank());
      State state{{chunk_of("x", x, region), {"y", {6}, {0}, clone(y)}}, {}};
      save(group, folder / "all", state, {.threads = threads});
      State other{{empty_chunk("x", x.sizes(), region), {"y", {6}, {0}, full({6}, 0)}}, {}};
      load(group, folder / "all", other);
      expect_part(other.chunks[0], x);
      expect_part(other.chunks[1], y);
    });
    const Index index = read_index(folder / "all");
    EXPECT_EQ(index.tensors.at("x").chunks.size(), 3u);
    EXPECT_EQ(index.tensors.at("y").chunks.size(), 1u) << "of copies one is written";
    EXPECT_TRUE(verify(folder / "all").empty());
  }
}

// spec: test_load_rowwise_to_colwise, test_load_with_different_shard_plan, test_switch_between_sharded_tensor_to_tensor
// spec: test_uneven_reshard_with_checkpointable_api
TEST(Checkpoint, AnySplitLoadsIntoAnyOther) {
  const Tensor x = numbered({14, 5});
  // Rows, columns, and all of it; over 1 to 4 ranks.
  const auto split = [&](int how, int64_t ranks, int64_t rank) {
    return how == 2 ? whole_of(x.sizes()) : shard(x.sizes(), static_cast<size_t>(how), ranks, rank);
  };
  const TemporaryFolder folder;
  for (int saved = 0; saved < 3; ++saved) {
    for (const int writers : {1, 4}) {
      const fs::path path = folder / std::to_string(10 * saved + writers);
      comm::run_ranks(writers, [&](comm::Group& group) {
        save(group, path, {{chunk_of("x", x, split(saved, writers, group.rank()))}, {}});
      });
      for (int loaded = 0; loaded < 3; ++loaded) {
        for (const int readers : {1, 3}) {
          comm::run_ranks(readers, [&](comm::Group& group) {
            State state{{empty_chunk("x", x.sizes(), split(loaded, readers, group.rank()))}, {}};
            load(group, path, state);
            expect_part(state.chunks[0], x);
          });
        }
      }
    }
  }
}

// Some cuts of a box into boxes.
std::vector<Region> random_cuts(const Shape& whole, std::mt19937& random) {
  std::vector<Region> regions{whole_of(whole)};
  const auto cuts = random() % 6;
  for (unsigned i = 0; i < cuts; ++i) {
    const size_t which = random() % regions.size(), dim = random() % whole.size();
    Region rest = regions[which];
    const int64_t at = static_cast<int64_t>(random()) % (rest.sizes[dim] + 1);
    regions[which].sizes[dim] = at;
    rest.offsets[dim] += at;
    rest.sizes[dim] -= at;
    regions.push_back(rest);
  }
  return regions;
}

TEST(Checkpoint, RandomLayoutsLoadIntoRandomLayouts) {
  const TemporaryFolder folder;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    Shape sizes;
    const size_t dims = 1 + random() % 3;
    for (size_t d = 0; d < dims; ++d) sizes.push_back(1 + static_cast<int64_t>(random() % 7));
    const Tensor x = numbered(sizes);
    const auto saved = random_cuts(sizes, random), loaded = random_cuts(sizes, random);
    const int writers = 1 + static_cast<int>(random() % 3), readers = 1 + static_cast<int>(random() % 3);
    // Which rank has which part: every part is on one rank at least, some on several.
    std::vector<std::set<size_t>> on(static_cast<size_t>(writers));
    for (size_t i = 0; i < saved.size(); ++i) {
      on[random() % on.size()].insert(i);
      if (random() % 3 == 0) on[random() % on.size()].insert(i);
    }
    const fs::path path = folder / std::to_string(seed);
    comm::run_ranks(writers, [&](comm::Group& group) {
      State state;
      for (const size_t i : on[static_cast<size_t>(group.rank())]) state.chunks.push_back(chunk_of("x", x, saved[i]));
      save(group, path, state);
    });
    comm::run_ranks(readers, [&](comm::Group& group) {
      State state;
      for (size_t i = 0; i < loaded.size(); ++i) {
        if (static_cast<int>(i) % readers == group.rank()) state.chunks.push_back(empty_chunk("x", sizes, loaded[i]));
      }
      load(group, path, state, {.verify = static_cast<Verify>(seed % 3)});
      for (const TensorChunk& chunk : state.chunks) expect_part(chunk, x);
    });
    if (HasFailure()) return;
  }
}

// spec: test_different_ordered_state_dict_keys
TEST(Checkpoint, RanksMayHaveTheirKeysInAnyOrder) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    State state = state_of({{"a", numbered({2})}, {"b", numbered({3}, 5)}});
    if (group.rank() == 1) std::swap(state.chunks[0], state.chunks[1]);
    save(group, folder / "all", state);
    for (TensorChunk& chunk : state.chunks) fill_(chunk.local, -1);
    load(group, folder / "all", state);
    const size_t a = group.rank() == 1 ? 1 : 0;
    EXPECT_EQ(state.chunks[a].local.to_vector<float>(), (std::vector<float>{0, 1}));
    EXPECT_EQ(state.chunks[1 - a].local.to_vector<float>(), (std::vector<float>{5, 6, 7}));
  });
}

}  // namespace
}  // namespace chorale::snapshot
