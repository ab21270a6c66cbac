#include "chorale/tensor/shape.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

// The offset of every element in row-major order, by definition.
std::vector<int64_t> offsets_of(const Shape& sizes, const Strides& strides) {
  std::vector<int64_t> offsets{0};
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < sizes[d]; ++i) next.push_back(offset + i * strides[d]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

TEST(Shape, Prints) {
  EXPECT_EQ(concat(Shape{}), "[]");
  EXPECT_EQ(concat(Shape{2}), "[2]");
  EXPECT_EQ(concat(Shape{2, 0, -3}), "[2, 0, -3]");
}

TEST(Shape, CountsElements) {
  EXPECT_EQ(count_elems(Shape{}), 1);
  EXPECT_EQ(count_elems(Shape{2, 3, 4}), 24);
  EXPECT_EQ(count_elems(Shape{2, 0, 4}), 0);
  EXPECT_EQ(count_elems(Shape{kMaxElems}), kMaxElems);
}

TEST(Shape, TooManyElementsAreAnErrorThatShowsTheShape) {
  const int64_t huge = int64_t{1} << 40;
  EXPECT_NE(message_of([&] {
              count_elems(Shape{huge, huge});
            }).find("[1099511627776, 1099511627776]"),
            std::string::npos);
  EXPECT_THROW(count_elems(Shape{kMaxElems + 1}), InvalidArgument);
  EXPECT_THROW(count_elems(Shape{huge, huge, huge, huge}), InvalidArgument);  // wraps around to zero twice
  // A zero anywhere means that there is nothing to count.
  EXPECT_EQ(count_elems(Shape{huge, huge, 0}), 0);
  EXPECT_EQ(count_elems(Shape{0, huge, huge}), 0);
}

TEST(Shape, ANegativeSizeIsAnErrorThatShowsTheShape) {
  EXPECT_NE(message_of([] { count_elems(Shape{2, -3}); }).find("[2, -3]"), std::string::npos);
  EXPECT_THROW(count_elems(Shape{0, -3}), InvalidArgument);
}

TEST(Shape, ContiguousStridesVisitMemoryInOrder) {
  EXPECT_EQ(contiguous_strides(Shape{}), Strides{});
  EXPECT_EQ(contiguous_strides(Shape{2, 3, 4}), (Strides{12, 4, 1}));
  EXPECT_EQ(contiguous_strides(Shape{2, 0, 4}), (Strides{4, 4, 1}));
  std::vector<int64_t> in_order(120);
  std::iota(in_order.begin(), in_order.end(), 0);
  const Shape sizes{2, 3, 4, 5};
  EXPECT_EQ(offsets_of(sizes, contiguous_strides(sizes)), in_order);
}

TEST(Shape, StridesOfAnEmptyShapeDoNotOverflow) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const Shape sizes{0, huge, huge};
  const Strides strides = contiguous_strides(sizes);
  EXPECT_TRUE(std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride > 0; }));
  EXPECT_TRUE(is_contiguous(sizes, strides));
  EXPECT_TRUE(is_channels_last(Shape{0, huge, huge, 2}, Strides{1, 1, 1, 1}));
}

TEST(Shape, ChannelsLastPutsChannelsFastest) {
  EXPECT_EQ(channels_last_strides(Shape{2, 3, 5}), (Strides{15, 1, 3}));
  EXPECT_EQ(channels_last_strides(Shape{2, 3, 4, 5}), (Strides{60, 1, 15, 3}));
  EXPECT_EQ(channels_last_strides(Shape{2, 3, 4, 5, 6}), (Strides{360, 1, 90, 18, 3}));
  EXPECT_TRUE(is_channels_last(Shape{2, 3, 4, 5}, Strides{60, 1, 15, 3}));
  EXPECT_FALSE(is_channels_last(Shape{2, 3, 4, 5}, contiguous_strides(Shape{2, 3, 4, 5})));
  // With one channel, or one pixel, both orders are the same.
  EXPECT_TRUE(is_channels_last(Shape{2, 1, 4, 5}, contiguous_strides(Shape{2, 1, 4, 5})));
  EXPECT_TRUE(is_channels_last(Shape{2, 3, 1, 1}, contiguous_strides(Shape{2, 3, 1, 1})));
  EXPECT_FALSE(is_channels_last(Shape{2, 3}, Strides{3, 1}));
  EXPECT_NE(message_of([] { channels_last_strides(Shape{2, 3}); }).find("[2, 3]"), std::string::npos);
}

TEST(Shape, ContiguousMeansInOrderWithoutHolesWhateverTheStridesOfOnes) {
  EXPECT_TRUE(is_contiguous(Shape{}, Strides{}));
  EXPECT_TRUE(is_contiguous(Shape{2, 1, 3}, Strides{3, 77, 1}));
  EXPECT_TRUE(is_contiguous(Shape{2, 0}, Strides{5, 9}));
  EXPECT_FALSE(is_contiguous(Shape{2, 3}, Strides{1, 2}));
  EXPECT_FALSE(is_contiguous(Shape{2, 3}, Strides{4, 1}));
  EXPECT_FALSE(is_contiguous(Shape{2, 3}, Strides{0, 1}));
}

TEST(Shape, DenseIsThatOffsetsFillAStretchOnce) {
  std::mt19937 random(1);
  int dense = 0;
  for (int round = 0; round < 20000; ++round) {
    Shape sizes(random() % 4);
    Strides strides(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = static_cast<int64_t>(random() % 5);
      strides[i] = static_cast<int64_t>(random() % 13);
    }
    std::vector<int64_t> offsets = offsets_of(sizes, strides);
    std::sort(offsets.begin(), offsets.end());
    bool expected = true;
    for (size_t i = 0; i < offsets.size(); ++i) expected &= offsets[i] == static_cast<int64_t>(i);
    ASSERT_EQ(is_dense(sizes, strides), expected) << sizes << " " << strides;
    dense += expected;
  }
  EXPECT_GT(dense, 1000);
}

TEST(Shape, ReachIsFromTheLowestToTheHighestOffset) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    Shape sizes(random() % 4);
    Strides strides(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = static_cast<int64_t>(random() % 5);
      strides[i] = static_cast<int64_t>(random() % 13) - 6;
    }
    const std::vector<int64_t> offsets = offsets_of(sizes, strides);
    const auto reach = reach_of(sizes, strides);
    ASSERT_TRUE(reach);
    if (offsets.empty()) {
      ASSERT_EQ(reach->high, reach->low);
    } else {
      ASSERT_EQ(reach->low, *std::min_element(offsets.begin(), offsets.end()));
      ASSERT_EQ(reach->high, *std::max_element(offsets.begin(), offsets.end()) + 1);
    }
  }
}

TEST(Shape, AReachBeyondCountingIsNone) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(reach_of(Shape{2}, Strides{huge}));
  EXPECT_FALSE(reach_of(Shape{3}, Strides{huge}));
  EXPECT_FALSE(reach_of(Shape{2, 2}, Strides{huge / 2 + 1, huge / 2 + 1}));
  EXPECT_FALSE(reach_of(Shape{2, 2}, Strides{-kMaxElems, 1}));
  EXPECT_FALSE(reach_of(Shape{2, 2}, Strides{std::numeric_limits<int64_t>::min(), huge}));
  EXPECT_TRUE(reach_of(Shape{2}, Strides{kMaxElems - 1}));
  EXPECT_TRUE(reach_of(Shape{1, 2}, Strides{huge, 1}));  // a stride that is never taken
  EXPECT_TRUE(reach_of(Shape{3, 0}, Strides{huge, 1}));  // nothing is touched
}

TEST(Shape, BroadcastsAsTheRulesSay) {
  const auto shape = [](const Shape& a, const Shape& b) { return broadcast_shapes("add", a, b); };
  EXPECT_EQ(shape({}, {}), Shape{});
  EXPECT_EQ(shape({3}, {}), Shape{3});
  EXPECT_EQ(shape({2, 3}, {3}), (Shape{2, 3}));
  EXPECT_EQ(shape({2, 1}, {1, 3}), (Shape{2, 3}));
  EXPECT_EQ(shape({5, 1, 4}, {3, 1}), (Shape{5, 3, 4}));
  EXPECT_EQ(shape({0}, {1}), Shape{0});
  EXPECT_EQ(shape({1}, {0}), Shape{0});
  EXPECT_EQ(shape({2, 0}, {2, 1}), (Shape{2, 0}));
}

TEST(Shape, ShapesThatDoNotBroadcastAreNamedWithTheDimension) {
  const std::string message = message_of([] { broadcast_shapes("add", {4, 2, 3}, {5, 3}); });
  for (const char* part : {"[add]", "[4, 2, 3]", "[5, 3]", "2 and 5", "dimension 1"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_THROW(broadcast_shapes("add", {0}, {2}), InvalidArgument);
}

TEST(Shape, BroadcastStridesRepeatWithoutMemory) {
  EXPECT_EQ(broadcast_strides({3}, {1}, {2, 3}), (Strides{0, 1}));
  EXPECT_EQ(broadcast_strides({2, 1}, {1, 1}, {2, 3}), (Strides{1, 0}));
  EXPECT_EQ(broadcast_strides({2, 1}, {5, 7}, {2, 1}), (Strides{5, 7}));
  EXPECT_EQ(broadcast_strides({}, {}, {2, 3}), (Strides{0, 0}));
}

TEST(Shape, DimensionsCountFromTheEndWhenNegative) {
  EXPECT_EQ(normalize_dim("sum", 0, 3), 0);
  EXPECT_EQ(normalize_dim("sum", -1, 3), 2);
  EXPECT_EQ(normalize_dim("sum", -3, 3), 0);
  EXPECT_EQ(normalize_dim("sum", 0, 0), 0);
  EXPECT_EQ(normalize_dim("sum", -1, 0), 0);
  for (const int64_t dim : {3, -4}) {
    const std::string message = message_of([&] { normalize_dim("sum", dim, 3); });
    for (const std::string& part :
         {std::string("[sum]"), std::to_string(dim), std::string("3 dimensions"), std::string("-3 to 2")}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
  EXPECT_THROW(normalize_dim("sum", 1, 0), InvalidArgument);
}

// All shapes with `count` elements and up to `rank` dimensions.
void factor(int64_t count, size_t rank, Shape& prefix, std::vector<Shape>& found) {
  if (count == 1) found.push_back(prefix);
  if (rank == 0) return;
  for (int64_t size = 1; size <= count; ++size) {
    if (count % size != 0) continue;
    prefix.push_back(size);
    factor(count / size, rank - 1, prefix, found);
    prefix.pop_back();
  }
}

// Strides of `to` are forced by the offsets themselves: dimension d moves on after as many elements as follow it. So a
// view exists exactly when those strides reproduce every offset.
bool view_exists(const std::vector<int64_t>& offsets, const Shape& to) {
  Strides forced(to.size(), 0);
  size_t step = 1;
  for (size_t d = to.size(); d-- > 0;) {
    if (to[d] > 1) forced[d] = offsets[step] - offsets[0];
    step *= static_cast<size_t>(to[d]);
  }
  return offsets_of(to, forced) == offsets;
}

TEST(Shape, ViewStridesExistExactlyWhenBruteForceFindsThem) {
  std::mt19937 random(2);
  int views = 0, copies = 0;
  for (int round = 0; round < 400; ++round) {
    Shape sizes(random() % 5);
    for (int64_t& size : sizes) size = static_cast<int64_t>(random() % 4 + 1);
    if (count_elems(sizes) > 36) continue;
    // Permuted, sliced, expanded, or just anything.
    Strides strides = contiguous_strides(sizes);
    for (int64_t& stride : strides) {
      switch (random() % 6) {
        case 0:
          stride *= 2;
          break;
        case 1:
          stride = 0;
          break;
        case 2:
          stride = static_cast<int64_t>(random() % 9) - 4;
          break;
        default:
          break;
      }
    }
    if (random() % 2 && sizes.size() > 1) {
      const size_t a = random() % sizes.size(), b = random() % sizes.size();
      std::swap(sizes[a], sizes[b]);
      std::swap(strides[a], strides[b]);
    }
    const std::vector<int64_t> offsets = offsets_of(sizes, strides);
    std::vector<Shape> targets;
    Shape prefix;
    factor(count_elems(sizes), 4, prefix, targets);
    for (const Shape& to : targets) {
      Strides result;
      const bool found = view_strides(sizes, strides, to, result);
      ASSERT_EQ(found, view_exists(offsets, to)) << sizes << " " << strides << " as " << to;
      if (found) {
        ASSERT_EQ(offsets_of(to, result), offsets) << sizes << " " << strides << " as " << to << ": " << result;
      }
      ++(found ? views : copies);
    }
  }
  EXPECT_GT(views, 1000);
  EXPECT_GT(copies, 1000);
}

TEST(Shape, AnEmptyShapeCanAlwaysBeViewed) {
  Strides result;
  EXPECT_TRUE(view_strides({2, 0, 3}, {1, 7, 5}, {0, 4}, result));
  EXPECT_EQ(result, (Strides{4, 1}));
}

}  // namespace
}  // namespace chorale
