// Checkpoints of sharded tensors, of plain files and of objects.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <numeric>
#include <random>

#include "chorale/api/api.h"
#include "chorale/comm/objects.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/io/safetensors.h"
#include "chorale/sharding/sharded.h"
#include "chorale/snapshot/agreement.h"
#include "chorale/snapshot/nested.h"
#include "chorale/snapshot/stateful.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

// Values that say where they stand.
Tensor counted(const Shape& sizes, double first = 0) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return add(reshape(arange(0, n, 1, DType::kF32), IntList(sizes)), first);
}

struct Split {
  std::vector<int> mesh;
  Placements placements;
};

// The mesh may leave some ranks of the group out.
Tensor sharded_as(const Tensor& x, const Split& split, const comm::Group& group) {
  int count = 1;
  for (const int n : split.mesh) count *= n;
  std::vector<int> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return distribute(x, Mesh(group, split.mesh, {}, ranks), split.placements, std::nullopt);
}

TEST(ShardedCheckpoint, WhatOneSplitSavedAnyOtherLoads) {
  const Tensor x = counted({9, 6});
  const std::vector<Split> splits = {
      {{4}, {chorale::shard(0)}},                          // 3, 3, 3 and no row
      {{4}, {chorale::shard(1)}},                          // 2, 2, 2 and no column
      {{3}, {strided_shard(0, 3)}},                        // one row of each of three stretches; a rank is left out
      {{2, 2}, {strided_shard(1, 2), chorale::shard(1)}},  // as data parallel over tensor parallel has it
      {{2, 2}, {chorale::shard(0), chorale::shard(1)}},
      {{2, 2}, {chorale::shard(0), replicate()}},
      {{4}, {replicate()}},
  };
  for (const Split& saved : splits) {
    const TemporaryFolder folder;
    comm::run_ranks(4, [&](comm::Group& group) {
      save(group, folder / "x", state_of({{"x", sharded_as(x, saved, group)}}, "model."));
      for (const Split& loaded : splits) {
        const Tensor y = sharded_as(full({9, 6}, -1), loaded, group);
        State state = state_of({{"x", y}}, "model.");
        load(group, folder / "x", state);
        if (mesh_of(y).is_member()) {
          EXPECT_EQ(full_tensor(y).to_vector<float>(), x.to_vector<float>())
              << saved.placements << " to " << loaded.placements;
        }
      }
    });
    // One process needs no mesh, and every element was written once.
    EXPECT_EQ(read(folder / "x").chunks[0].local.to_vector<float>(), x.to_vector<float>()) << saved.placements;
    int64_t elems = 0;
    const Index index = read_index(folder / "x");
    for (const SavedChunk& chunk : index.tensors.at("model.x").chunks) elems += chunk.region.volume();
    EXPECT_EQ(elems, x.elems()) << saved.placements;
  }
}

// spec: test_checkpoint_apis_check_partial_placement
TEST(ShardedCheckpoint, PartialValuesAreRefusedBySavesAndLoads) {
  comm::run_ranks(2, [&](comm::Group& group) {
    const Tensor x = from_local(counted({4}), Mesh(group, {2}), {partial()});
    // Both begin with it; a file of tensors has no place for parts of any kind.
    const std::string message = message_of<InvalidArgument>([&] { state_of({{"x", x}}, "model."); });
    EXPECT_NE(message.find("model.x is placed as [P(sum)]"), std::string::npos) << message;
    EXPECT_NE(message.find("redistribute() it first"), std::string::npos) << message;
    State by_hand{{{"x", {4}, {0}, x}}, {}};
    const TemporaryFolder folder;
    for (const auto& call : {std::function<void()>([&] { save(folder / "x", by_hand); }), std::function<void()>([&] {
                               io::save(folder / "x.safetensors", {{"x", x}});
                             })}) {
      try {
        call();
        ADD_FAILURE() << "was taken";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("sharded as [P(sum)]"), std::string::npos) << error.what();
      }
    }
  });
}

// A tensor that is saved in one way and loaded in another.
struct Relayout {
  Tensor whole;
  Tensor saved, loaded, expected;
};
// All of them in one checkpoint. No rank needs another one's parts to judge its own.
void expect_loads(const comm::Group& group, const std::filesystem::path& folder, const std::vector<Relayout>& all) {
  State saved, loaded;
  for (size_t i = 0; i < all.size(); ++i) {
    add_chunks(saved, std::to_string(i), all[i].saved);
    add_chunks(loaded, std::to_string(i), all[i].loaded);
  }
  save(group, folder, saved);
  load(group, folder, loaded);
  for (size_t i = 0; i < all.size(); ++i) {
    const Relayout& one = all[i];
    if (!mesh_of(one.loaded).is_member()) continue;
    ASSERT_EQ(to_local(one.loaded).to_vector<double>(), to_local(one.expected).to_vector<double>())
        << i << ": " << one.whole.dtype() << " " << one.whole.sizes() << ", " << placements_of(one.saved) << " over a "
        << mesh_of(one.saved) << " to " << placements_of(one.loaded) << " over a " << mesh_of(one.loaded);
  }
}
// Saved in each of these ways and loaded in each of those.
void expect_all_pairs(const Tensor& x, const std::vector<Split>& saved, const std::vector<Split>& loaded) {
  const TemporaryFolder folder;
  comm::run_ranks(4, [&](comm::Group& group) {
    std::vector<Tensor> parts, wanted;
    for (const Split& split : saved) parts.push_back(sharded_as(x, split, group));
    for (const Split& split : loaded) wanted.push_back(sharded_as(x, split, group));
    std::vector<Relayout> all;
    for (const Tensor& from : parts) {
      for (const Tensor& to : wanted) {
        const Tensor room = distribute(full(x.sizes(), -1), mesh_of(to), placements_of(to), std::nullopt);
        all.push_back({x, from, room, to});
      }
    }
    expect_loads(group, folder / "x", all);
  });
}

std::vector<Split> lines_of_four() {
  return {{{4}, {replicate()}}, {{4}, {chorale::shard(0)}}, {{4}, {chorale::shard(1)}}};
}
std::vector<Split> squares() {
  std::vector<Split> splits;
  for (const Placement& a : {replicate(), chorale::shard(0), chorale::shard(1)}) {
    for (const Placement& b : {replicate(), chorale::shard(0), chorale::shard(1)}) splits.push_back({{2, 2}, {a, b}});
  }
  return splits;
}

// 300 times: a mesh of one to four ranks, placements, a shape (perhaps empty) and a dtype into another mesh and
// placements.
TEST(ShardedCheckpoint, RandomLayoutsLoadIntoRandomLayouts) {
  const TemporaryFolder folder;
  comm::run_ranks(4, [&](comm::Group& group) {
    std::vector<Mesh> meshes;
    for (const std::vector<int>& shape : {std::vector{1}, {2}, {3}, {4}, {2, 2}, {1, 3}, {2, 1}}) {
      std::vector<int> ranks(static_cast<size_t>(std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>())));
      std::iota(ranks.begin(), ranks.end(), 0);
      meshes.emplace_back(group, shape, std::vector<std::string>{}, ranks);
    }
    std::mt19937 random(17);  // the same on all ranks
    for (int round = 0; round < 6; ++round) {
      std::vector<Relayout> all;
      for (int i = 0; i < 50; ++i) {
        Shape sizes;
        const size_t dims = 1 + random() % 3;
        for (size_t d = 0; d < dims; ++d) sizes.push_back(static_cast<int64_t>(random() % 8));
        const DType dtype = std::array{DType::kF32, DType::kBF16, DType::kI64, DType::kU8}[random() % 4];
        const Tensor x = to(counted(sizes), dtype);
        const auto layout = [&] {
          const Mesh& mesh = meshes[random() % meshes.size()];
          Placements placements;
          for (size_t k = 0; k < mesh.dims(); ++k) {
            const auto dim = static_cast<int64_t>(random() % dims);
            placements.push_back(random() % 4 == 0 ? replicate() : chorale::shard(dim));
          }
          return std::pair(mesh, placements);
        };
        const auto from = layout(), onto = layout();
        all.push_back({x, distribute(x, from.first, from.second, std::nullopt),
                       distribute(to(full(sizes, 99), dtype), onto.first, onto.second, std::nullopt),
                       distribute(x, onto.first, onto.second, std::nullopt)});
      }
      expect_loads(group, folder / std::to_string(round), all);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

// spec: test_1d_to_1d_reshard_placement_change, test_2d_to_2d_reshard_placement_change
TEST(ShardedCheckpoint, AnyPlacementLoadsAnyOther) {
  expect_all_pairs(counted({4, 4}), lines_of_four(), lines_of_four());
  expect_all_pairs(counted({4, 4}), squares(), squares());
}

// spec: test_1d_to_2d_reshard_mesh_change, test_2d_to_1d_reshard_mesh_change
TEST(ShardedCheckpoint, AnyMeshLoadsAnyOther) {
  expect_all_pairs(counted({4, 4}), lines_of_four(), squares());
  expect_all_pairs(counted({4, 4}), squares(), lines_of_four());
}

// spec: test_dtensor_checkpoint_resharding_with_empty_shard
TEST(ShardedCheckpoint, PartsMayBeEmpty) {
  const Split four{{4}, {chorale::shard(0)}}, square{{2, 2}, {chorale::shard(0), chorale::shard(0)}};
  expect_all_pairs(counted({1}, 7), {four}, {square, four});
}

// spec: test_dtensor_checkpoint_with_uneven_shards
TEST(ShardedCheckpoint, PartsMayBeUneven) {
  const Tensor x = counted({14, 1});
  const Split four{{4}, {chorale::shard(0)}};
  expect_all_pairs(x, {four}, {{{2, 2}, {chorale::shard(0), replicate()}}, {{2, 2}, {replicate(), chorale::shard(0)}}});
  const TemporaryFolder folder;
  comm::run_ranks(4, [&](comm::Group& group) {
    const Tensor mine = sharded_as(x, four, group);
    EXPECT_EQ(to_local(mine).size(0), group.rank() < 3 ? 4 : 2);
    save(group, folder / "x", state_of({{"x", mine}}));
    State plain = state_of({{"x", full({14, 1}, -1)}});
    load(group, folder / "x", plain);
    EXPECT_EQ(plain.chunks[0].local.to_vector<float>(), x.to_vector<float>());
  });
  EXPECT_EQ(read_index(folder / "x").tensors.at("x").chunks.size(), 4u);
}

// spec: test_distributed_tensor_planner
TEST(ShardedCheckpoint, RanksOutsideOfAMeshNeitherWriteNorRead) {
  const TemporaryFolder folder;
  const Tensor a = counted({8, 2}), b = counted({4}, 100), c = counted({6}, 200);
  const Split four{{4}, {chorale::shard(0)}}, all{{4}, {replicate()}}, two{{2}, {chorale::shard(0)}};
  comm::run_ranks(4, [&](comm::Group& group) {
    save(group, folder / "x",
         state_of(
             {{"a", sharded_as(a, four, group)}, {"b", sharded_as(b, all, group)}, {"c", sharded_as(c, two, group)}}));
    const Tensor x = sharded_as(full({8, 2}, -1), four, group), y = sharded_as(full({4}, -1), all, group),
                 z = sharded_as(full({6}, -1), two, group);
    State state = state_of({{"a", x}, {"b", y}, {"c", z}});
    EXPECT_EQ(state.chunks.size(), group.rank() < 2 ? 3u : 2u);
    load(group, folder / "x", state);
    EXPECT_EQ(full_tensor(x).to_vector<float>(), a.to_vector<float>());
    EXPECT_EQ(to_local(y).to_vector<float>(), b.to_vector<float>());
    if (group.rank() < 2) {
      EXPECT_EQ(full_tensor(z).to_vector<float>(), c.to_vector<float>());
    }
  });
  const Index index = read_index(folder / "x");
  EXPECT_EQ(index.tensors.at("a").chunks.size(), 4u);
  EXPECT_EQ(index.tensors.at("b").chunks.size(), 1u) << "one copy is written";
  ASSERT_EQ(index.tensors.at("c").chunks.size(), 2u);
  for (const SavedChunk& chunk : index.tensors.at("c").chunks)
    EXPECT_TRUE(chunk.file.starts_with("rank-0-") || chunk.file.starts_with("rank-1-")) << chunk.file;
}

// spec: test_dcp_to_torch_save, test_torch_save_to_dcp
TEST(ShardedCheckpoint, BecomesOneOrdinaryFileAndIsMadeOfOne) {
  const TemporaryFolder folder;
  const Tensor x = counted({5, 3}), y = counted({2}, 50);
  const Split rows{{2}, {chorale::shard(0)}}, columns{{2}, {chorale::shard(1)}};
  comm::run_ranks(2, [&](comm::Group& group) {
    save(group, folder / "parts", state_of({{"x", sharded_as(x, rows, group)}, {"y", y}}));
  });
  NamedTensors whole;
  for (const TensorChunk& chunk : read(folder / "parts").chunks) whole.emplace_back(chunk.key, chunk.local);
  std::filesystem::create_directory(folder / "plain");
  io::save(folder / "plain/model.safetensors", whole);
  const io::SafetensorsFile file(folder / "plain/model.safetensors");
  EXPECT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.load("x").to_vector<float>(), x.to_vector<float>());
  EXPECT_EQ(file.load("y").to_vector<float>(), y.to_vector<float>());
  save(folder / "back", read(folder / "plain"));
  comm::run_ranks(2, [&](comm::Group& group) {
    for (const char* name : {"back", "plain"}) {
      const Tensor z = sharded_as(full({5, 3}, -1), columns, group);
      State state = state_of({{"x", z}});
      load(group, folder / name, state);
      EXPECT_EQ(full_tensor(z).to_vector<float>(), x.to_vector<float>()) << name;
    }
  });
}

// spec: sharded:test_gather_object, test_scatter_object, test_broadcast_object_with_nonzero_coordinator
// spec: test_broadcast_object_global_local_mismatch
TEST(Coordination, ValuesGoToAndFromAnyRankOfASubgroup) {
  comm::run_ranks(4, [](comm::Group& group) {
    const comm::Group part = group.new_group({1, 3});
    if (!part.is_member()) return;
    for (const int root : {1, 3}) {  // global ranks; in the group these are 0 and 1
      const std::vector<comm::Value> all = comm::gather_object(part, comm::Value(10 * group.rank()), root);
      if (group.rank() == root) {
        ASSERT_EQ(all.size(), 2u);
        EXPECT_EQ(all[0].as<int64_t>(), 10);
        EXPECT_EQ(all[1].as<int64_t>(), 30);
      } else {
        EXPECT_TRUE(all.empty());
      }
      std::vector<comm::Value> own(1), given;
      if (group.rank() == root)
        given = {comm::Value(concat("for 1 of ", root)), comm::Value(concat("for 3 of ", root))};
      comm::scatter_object_list(part, own, given, root);
      EXPECT_EQ(own[0].as<std::string>(), concat("for ", group.rank(), " of ", root));
      std::vector<comm::Value> told{group.rank() == root ? comm::Value(concat("from ", root)) : comm::Value()};
      comm::broadcast_object_list(part, told, root);
      EXPECT_EQ(told[0].as<std::string>(), concat("from ", root));
    }
  });
}

// spec: test_local_plan
TEST(LocalPlan, HasAnItemOfEachKind) {
  comm::run_ranks(4, [&](comm::Group& group) {
    const Mesh mesh(group, {4}, {"shard"});
    const NoGrad quiet;
    State state = state_of({{"tensor", counted({10})}, {"sharded", distribute(counted({32}), mesh, {shard(0)})}});
    state.bytes["list"] = "[1, 2]";
    const std::vector<WriteItem> items = items_of(state, true);
    ASSERT_EQ(items.size(), 3u);
    EXPECT_EQ(items[0].key, "tensor");
    EXPECT_EQ(items[0].region, (Region{{0}, {10}}));
    EXPECT_EQ(items[0].bytes(), 40);
    EXPECT_NE(items[0].fingerprint, 0u) << "other ranks may have it too";
    EXPECT_EQ(items[1].key, "sharded");
    EXPECT_EQ(items[1].whole, (Shape{32}));
    EXPECT_EQ(items[1].region, (Region{{8 * group.rank()}, {8}}));
    EXPECT_EQ(items[1].dtype, DType::kF32);
    EXPECT_TRUE(items[2].is_bytes && items[2].key == "list" && items[2].bytes() == 6);
    // All ranks' items together: each key and offset once, where its chunk is.
    std::vector<std::vector<WriteItem>> all;
    for (int r = 0; r < 4; ++r) {
      all.push_back(items);
      all.back()[1].region.offsets = {8 * r};
    }
    std::map<std::pair<std::string, int64_t>, int> written;
    const SavePlan plan = plan_save(all);
    for (size_t r = 0; r < 4; ++r) {
      for (const size_t i : plan.writes[r]) ++written[{all[r][i].key, all[r][i].region.offsets[0]}];
    }
    EXPECT_EQ(written.size(), 6u);
    for (const auto& [place, times] : written) EXPECT_EQ(times, 1) << place.first << " at " << place.second;
  });
}

// spec: test_auto_detect, test_assert_same_keys
TEST(Checkpoints, AreKnownByTheirFolderAndStatesByTheirKeys) {
  const TemporaryFolder folder;
  const Tensor x = counted({3});
  save(folder / "ours", state_of({{"x", x}}));
  std::filesystem::create_directories(folder / "plain");
  std::filesystem::create_directories(folder / "empty");
  io::save(folder / "plain/model.safetensors", {{"x", x}});
  for (const char* name : {"ours", "plain"}) {
    State state = state_of({{"x", zeros({3})}});
    load(folder / name, state);
    EXPECT_EQ(state.chunks[0].local.to_vector<float>(), x.to_vector<float>()) << name;
  }
  EXPECT_THROW(find_index(folder / "empty"), InvalidArgument);
  EXPECT_THROW(find_index(folder / "nowhere"), InvalidArgument);
  comm::run_ranks(3, [&](comm::Group& group) {
    State state = state_of({{"a", counted({2})}, {"b", counted({2})}});
    state.bytes["c"] = "1";
    if (group.rank() == 1) std::swap(state.chunks[0], state.chunks[1]);
    check_same_keys(group, state);  // the order does not count
    if (group.rank() == 2) state.chunks.pop_back();
    if (group.rank() == 0) state.bytes["d"] = "2";
    EXPECT_EQ(message_of<InvalidArgument>([&] { check_same_keys(group, state); }),
              "[checkpoint] the ranks' keys differ: rank 1 has no d, rank 2 has no b, rank 2 has no d");
  });
}

// spec: test_flattening_round_trip, test_traverse_shallow, test_traverse_nested_list, test_traverse_nested_dict
// spec: test_traverse_doesnt_ignore_intermediate_collections, test_traverse_with_ordered_dict
TEST(NestedState, BecomesFlatAndNestedAgain) {
  const auto bytes = [](const char* text) { return Nested{text}; };
  const auto names = [](const Flattened& flat) {
    std::vector<std::string> all;
    for (const auto& [key, value] : flat.values) all.push_back(key);
    return all;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(flatten({NestedMap{{"b", bytes("1")}, {"a", bytes("2")}}})), (Names{"a", "b"}));
  EXPECT_EQ(names(flatten({NestedMap{{"x", {NestedList{bytes("1"), {NestedList{bytes("2"), bytes("3")}}}}}}})),
            (Names{"x.0", "x.1.0", "x.1.1"}));
  const Tensor weight = counted({2});
  // Collections on the way, empty ones, names that look like places or have dots in them.
  const Nested all{NestedMap{{"model", {NestedMap{{"layers", {NestedList{{NestedMap{{"weight", {weight}}}}}}}}}},
                             {"empty", {NestedMap{}}},
                             {"none", {NestedList{}}},
                             {"0", {NestedMap{{"1", bytes("x")}}}},
                             {"a.b", {NestedMap{{"c", bytes("y")}}}}}};
  const Flattened flat = flatten(all);
  EXPECT_EQ(names(flat), (Names{"0.1", "a.b.c", "empty", "model.layers.0.weight", "none"}));
  const Nested back = unflatten(flat);
  const auto& map = std::get<NestedMap>(back.value);
  EXPECT_EQ(map.size(), 5u);
  EXPECT_TRUE(std::get<NestedMap>(map.at("empty").value).empty());
  EXPECT_TRUE(std::get<NestedList>(map.at("none").value).empty());
  EXPECT_EQ(std::get<std::string>(std::get<NestedMap>(map.at("0").value).at("1").value), "x");
  EXPECT_EQ(std::get<std::string>(std::get<NestedMap>(map.at("a.b").value).at("c").value), "y");
  const Nested& layers = std::get<NestedMap>(map.at("model").value).at("layers");
  ASSERT_EQ(std::get<NestedList>(layers.value).size(), 1u);
  const Nested& first = std::get<NestedList>(layers.value)[0];
  EXPECT_TRUE(std::get<Tensor>(std::get<NestedMap>(first.value).at("weight").value).is(weight));
  EXPECT_EQ(names(flatten(back)), names(flat));
  EXPECT_THROW(flatten({NestedMap{{"a.b", bytes("1")}, {"a", {NestedMap{{"b", bytes("2")}}}}}}), InvalidArgument);
}

// ---- objects

// Counts, and asks the others while it does: ranks that visit objects in different orders would wait for ever.
struct Counter {
  const comm::Group& group;
  int64_t count = 0;
  Stateful stateful() {
    return {.state =
                [this] {
                  group.barrier().wait();
                  State state;
                  state.bytes["count"] = std::to_string(count);
                  return state;
                },
            .load = [this](const State& state) { count = std::stoll(state.bytes.at("count")); }};
  }
};
struct Table {
  Tensor values;
  NamedTensors state_dict() const { return {{"values", values}}; }
  void load_state_dict(const NamedTensors& state) { values = clone(state.at(0).second); }
};

// spec: test_stateful_and_non_stateful_loads
TEST(Objects, AreSavedAndLoadedWithWhatIsNone) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    Counter steps{group, 12}, epochs{group, 3};
    Table table{counted({2, 3})};
    Objects objects{{"table", snapshot::stateful(table)}, {"steps", steps.stateful()}, {"epochs", epochs.stateful()}};
    const Tensor loose = counted({4}, 9);
    State rest = state_of({{"loose", loose}});
    rest.bytes["note"] = "mine";
    save_objects(group, folder / "x", objects, rest);
    steps.count = epochs.count = 0;
    const Tensor before = table.values;
    fill_(before, 0);
    fill_(loose, 0);
    rest.bytes["note"] = "?";
    load_objects(group, folder / "x", objects, rest);
    EXPECT_EQ(steps.count, 12);
    EXPECT_EQ(epochs.count, 3);
    EXPECT_EQ(table.values.to_vector<float>(), counted({2, 3}).to_vector<float>());
    EXPECT_NE(table.values.raw(), before.raw()) << "load_state_dict was called";
    EXPECT_EQ(loose.to_vector<float>(), counted({4}, 9).to_vector<float>());
    EXPECT_EQ(rest.bytes["note"], "mine");
  });
  EXPECT_TRUE(read_index(folder / "x").bytes.contains("steps/count"));
  EXPECT_TRUE(read_index(folder / "x").tensors.contains("table/values"));
}

TEST(Objects, WhatOneThrowsEveryRankThrows) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    Table table{counted({2})};
    Objects objects{{"table", snapshot::stateful(table)}};
    if (group.rank() == 1) objects["broken"] = {.state = []() -> State { throw std::runtime_error("no state"); }};
    const std::string message = message_of<CheckpointError>([&] { save_objects(group, folder / "x", objects); });
    EXPECT_NE(message.find("rank 1: no state"), std::string::npos) << message;
  });
  EXPECT_FALSE(has_checkpoint(folder / "x"));
}

}  // namespace
}  // namespace chorale::snapshot
