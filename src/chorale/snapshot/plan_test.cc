// Plans of saves and loads: pure functions, compared with numbers of the catalogue.
#include "chorale/snapshot/plan.h"

#include <gtest/gtest.h>

#include "chorale/testing/message_test_util.h"

namespace chorale::snapshot {
namespace {

WriteItem part(const std::string& key, Shape whole, Shape offsets, Shape sizes, uint64_t fingerprint = 0) {
  return {.key = key,
          .dtype = DType::kF32,
          .whole = std::move(whole),
          .region = {std::move(offsets), std::move(sizes)},
          .fingerprint = fingerprint};
}

// A tensor of n elements that was saved by `ranks` ranks.
SavedTensor saved_by(int64_t n, int64_t ranks) {
  SavedTensor tensor{DType::kF32, {n}, {}};
  for (int64_t r = 0; r < ranks; ++r) tensor.chunks.push_back({{{r * n / ranks}, {n / ranks}}, "", "", 0});
  return tensor;
}

struct Read {
  int64_t saved, in_saved, in_local, length;
  friend bool operator==(const Read&, const Read&) = default;
};
std::vector<Read> reads(const SavedTensor& saved, int64_t begin, int64_t length) {
  std::vector<Read> result;
  for (const ReadItem& item : plan_read("x", saved, saved.sizes, {{begin}, {length}})) {
    result.push_back(
        {saved.chunks[item.chunk].region.offsets[0], item.in_saved[0], item.in_local[0], item.region.sizes[0]});
  }
  return result;
}

// spec: test_load_with_resharding
TEST(PlanRead, FindsThePartsOfAnotherNumberOfRanks) {
  // 128 elements. Saved by 8, loaded by 4: rank 1 has [32, 64).
  EXPECT_EQ(reads(saved_by(128, 8), 32, 32), (std::vector<Read>{{32, 0, 0, 16}, {48, 0, 16, 16}}));
  // Saved by 4, loaded by 8: rank 1 has [16, 32).
  EXPECT_EQ(reads(saved_by(128, 4), 16, 16), (std::vector<Read>{{0, 16, 0, 16}}));
}

// spec: test_load_with_world_size_diff_by_one
TEST(PlanRead, FindsPartsThatDoNotBeginTogether) {
  EXPECT_EQ(reads(saved_by(120, 4), 40, 40), (std::vector<Read>{{30, 10, 0, 20}, {60, 0, 20, 20}}));
}

// spec: test_create_read_item_from_chunks
TEST(PlanRead, CutsOutWhatIsWanted) {
  EXPECT_EQ(reads(saved_by(16, 2), 4, 7), (std::vector<Read>{{0, 4, 0, 4}, {8, 0, 4, 3}}));
}

TEST(PlanRead, WorksInSeveralDimensionsAndOnEmptyParts) {
  SavedTensor saved{DType::kF32, {4, 6}, {}};
  saved.chunks = {{{{0, 0}, {4, 3}}, "", "", 0}, {{{0, 3}, {4, 3}}, "", "", 0}};
  const auto items = plan_read("x", saved, {4, 6}, {{2, 2}, {2, 4}});
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].region, (Region{{2, 2}, {2, 1}}));
  EXPECT_EQ(items[0].in_saved, (Shape{2, 2}));
  EXPECT_EQ(items[0].in_local, (Shape{0, 0}));
  EXPECT_EQ(items[1].region, (Region{{2, 3}, {2, 3}}));
  EXPECT_EQ(items[1].in_saved, (Shape{2, 0}));
  EXPECT_EQ(items[1].in_local, (Shape{0, 1}));
  EXPECT_TRUE(plan_read("x", saved, {4, 6}, {{4, 0}, {0, 6}}).empty());
  // Without dimensions there is one element.
  SavedTensor number{DType::kF32, {}, {{{{}, {}}, "", "", 0}}};
  EXPECT_EQ(plan_read("x", number, {}, {{}, {}}).size(), 1u);
}

// spec: test_load_different_sizes_throws
TEST(PlanRead, AnotherShapeIsAnError) {
  EXPECT_EQ(message_of<InvalidArgument>([] {
              plan_read("net.weight", saved_by(4, 2), {6}, {{0}, {6}});
            }),
            "[checkpoint] net.weight was saved with shape [4] and is to be loaded into one of shape [6]");
}

// spec: test_global_plan, test_dedup_plans
TEST(PlanSave, WritesEachKeyAndOffsetOnce) {
  // 4 ranks: a tensor that all have, and one of which each has 8 elements.
  std::vector<std::vector<WriteItem>> items;
  for (int64_t r = 0; r < 4; ++r) {
    items.push_back({part("tensor", {10}, {0}, {10}), part("sharded", {32}, {8 * r}, {8})});
    items.back().push_back({.key = "list", .is_bytes = true, .whole = {5}, .region = {{0}, {5}}});
  }
  const SavePlan plan = plan_save(items);
  int tensors = 0, lists = 0;
  for (size_t r = 0; r < 4; ++r) {
    for (const size_t i : plan.writes[r]) {
      tensors += i == 0 ? 1 : 0;
      lists += i == 2 ? 1 : 0;
    }
    EXPECT_EQ(std::count(plan.writes[r].begin(), plan.writes[r].end(), size_t{1}), 1) << "its own part";
  }
  EXPECT_EQ(tensors, 1);
  EXPECT_EQ(lists, 1);
  EXPECT_TRUE(plan.differing.empty());
}

// What a part is follows from its key and offset alone; where it stands in a rank's list, by which the index of saved
// chunks is filled, takes no part in telling parts apart or in finding them again.
// spec: test_index_hint_ignored_on_{equals,hash}
TEST(PlanSave, WhereAPartStandsInAListDoesNotMatter) {
  const WriteItem a = part("a", {4}, {0}, {4}, 1), low = part("b", {6}, {0}, {3}), high = part("b", {6}, {3}, {3});
  for (const auto& second : {std::vector{a, low, high}, std::vector{high, a, low}, std::vector{low, high, a}}) {
    const std::vector<std::vector<WriteItem>> lists{{a, low, high}, second};
    const SavePlan plan = plan_save(lists);
    std::vector<std::string> written;
    for (size_t r = 0; r < 2; ++r) {
      for (const size_t i : plan.writes[r]) {
        const WriteItem& item = lists[r][i];
        written.push_back(concat(item.key, "@", item.region.offsets));
      }
    }
    std::sort(written.begin(), written.end());
    EXPECT_EQ(written, (std::vector<std::string>{"a@[0]", "b@[0]", "b@[3]"}));
    EXPECT_TRUE(plan.differing.empty()) << "copies that are equal, at whatever place";
  }
  // The order of the chunks of an index does not matter either, when the same region is looked for.
  SavedTensor saved{DType::kF32, {6}, {{{{0}, {3}}, "f", "x@[0]", 0}, {{{3}, {3}}, "g", "x@[3]", 0}}};
  const auto found = plan_read("x", saved, {6}, {{3}, {3}});
  std::swap(saved.chunks[0], saved.chunks[1]);
  const auto again = plan_read("x", saved, {6}, {{3}, {3}});
  ASSERT_TRUE(found.size() == 1 && again.size() == 1);
  EXPECT_EQ(found[0].chunk, 1u);
  EXPECT_EQ(again[0].chunk, 0u);
  EXPECT_EQ(found[0].region, again[0].region);
}

TEST(PlanSave, CopiesGoToTheRankWithLeastToWrite) {
  const WriteItem a = part("a", {100}, {0}, {100}), b = part("b", {60}, {0}, {60}), c = part("c", {30}, {0}, {30});
  const SavePlan plan = plan_save({{a, b, c}, {a, b, c}});
  EXPECT_EQ(plan.writes[0], (std::vector<size_t>{0}));
  EXPECT_EQ(plan.writes[1], (std::vector<size_t>{1, 2}));
}

TEST(PlanSave, NamesCopiesThatDiffer) {
  const SavePlan plan = plan_save({{part("same", {4}, {0}, {4}, 7), part("other", {4}, {0}, {4}, 7)},
                                   {part("same", {4}, {0}, {4}, 7), part("other", {4}, {0}, {4}, 8)}});
  EXPECT_EQ(plan.differing, std::vector<std::string>{"other"});
}

// spec: test_non_overlapping_chunks
TEST(PlanSave, PartsMayMakeTheWholeInAnyWay) {
  const Shape whole{4, 4};
  plan_save({{part("x", whole, {0, 0}, {2, 4})}, {part("x", whole, {2, 0}, {2, 2}), part("x", whole, {2, 2}, {2, 2})}});
  // The last ranks may have nothing, at the end of the whole.
  const SavePlan plan = plan_save({{part("y", {1}, {0}, {1})}, {part("y", {1}, {1}, {0})}, {part("y", {1}, {1}, {0})}});
  EXPECT_EQ(plan.writes[0].size(), 1u);
  EXPECT_TRUE(plan.writes[1].empty() && plan.writes[2].empty());
}

// spec: test_detect_overlapping_chunks
TEST(PlanSave, PartsThatDoNotMakeTheWholeAreErrors) {
  const auto message = [](const std::vector<std::vector<WriteItem>>& items) {
    return message_of<InvalidArgument>([&] { plan_save(items); });
  };
  EXPECT_EQ(message({{part("x", {8}, {0}, {5})}, {part("x", {8}, {4}, {4})}}),
            "[checkpoint] x: parts at [0]+[5] and [4]+[4] overlap");
  EXPECT_EQ(message({{part("x", {8}, {0}, {4})}, {part("x", {8}, {5}, {3})}}),
            "[checkpoint] x: its parts have 7 elements together, and the whole, [8], has 8");
  EXPECT_EQ(message({{part("x", {8}, {0}, {4})}, {part("x", {8}, {4}, {5})}}),
            "[checkpoint] x: a part at [4]+[5] reaches beyond the whole, [8]");
  EXPECT_EQ(message({{part("x", {8}, {0}, {8})}, {part("x", {9}, {0}, {9})}}),
            "[checkpoint] x is f32 [9] on rank 1 and f32 [8] on rank 0; give what is not one tensor different keys");
}

TEST(Balanced, LargeOnesGoFirst) {
  const auto bins = balanced({1, 5, 3, 3}, 2);
  EXPECT_EQ(bins[0], (std::vector<size_t>{1, 0}));
  EXPECT_EQ(bins[1], (std::vector<size_t>{2, 3}));
}

}  // namespace
}  // namespace chorale::snapshot
