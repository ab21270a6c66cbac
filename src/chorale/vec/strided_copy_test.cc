#include "chorale/vec/strided_copy.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "chorale/base/small_vector.h"

namespace chorale::vec {
namespace {

using Sizes = std::vector<int64_t>;

// Calls f with the index of every element, by counting: slow and obvious.
template <class F>
void for_each_index(const Sizes& sizes, F&& f) {
  Sizes index(sizes.size(), 0);
  for (int64_t size : sizes) {
    if (size == 0) return;
  }
  while (true) {
    f(index);
    size_t d = sizes.size();
    while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}
int64_t offset_of(const Sizes& index, const Sizes& strides) {
  int64_t offset = 0;
  for (size_t d = 0; d < index.size(); ++d) offset += index[d] * strides[d];
  return offset;
}

// A layout without overlaps, dimensions in any order, with gaps and with directions reversed.
struct Layout {
  Sizes strides;
  int64_t origin = 0, reach = 1;
};
Layout draw_layout(const Sizes& sizes, std::mt19937& random) {
  Layout layout{Sizes(sizes.size())};
  std::vector<size_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::shuffle(order.begin(), order.end(), random);
  int64_t step = random() % 3 == 0 ? 2 : 1;
  for (size_t d : order) {
    const int64_t size = std::max<int64_t>(sizes[d], 1);
    const bool reversed = random() % 4 == 0;
    layout.strides[d] = reversed ? -step : step;
    if (reversed) layout.origin += step * (size - 1);
    step = step * size + (random() % 4 == 0 ? 3 : 0);
  }
  layout.reach = step + 1;
  return layout;
}
Sizes draw_sizes(std::mt19937& random) {
  constexpr int64_t sizes[] = {1, 2, 3, 5, 8, 67, 130};
  Sizes drawn(random() % 5);
  for (int64_t& size : drawn) size = sizes[random() % (drawn.size() > 3 ? 5 : std::size(sizes))];
  if (random() % 20 == 0 && !drawn.empty()) drawn[0] = 0;
  return drawn;
}

TEST(StridedCopy, MovesEveryElementToItsPlaceAndTouchesNothingElse) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const Sizes sizes = draw_sizes(random);
    const Layout from = draw_layout(sizes, random), to = draw_layout(sizes, random);
    std::vector<int32_t> source(static_cast<size_t>(from.reach));
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<int32_t>(i * 2654435761u % 1000003);
    std::vector<int32_t> found(static_cast<size_t>(to.reach), -1), expected = found;
    for_each_index(sizes, [&](const Sizes& index) {
      expected[static_cast<size_t>(to.origin + offset_of(index, to.strides))] =
          source[static_cast<size_t>(from.origin + offset_of(index, from.strides))];
    });
    const Threads threads = round % 2 ? Threads::kOne : Threads::kAll;
    copy_strided({source.data() + from.origin, DType::kI32, sizes, from.strides},
                 {found.data() + to.origin, DType::kI32, sizes, to.strides}, threads);
    ASSERT_EQ(found, expected) << "round " << round;
  }
}

TEST(StridedCopy, ConvertsAndRepeatsElementsOfStrideZero) {
  const std::vector<double> row = {1.75, -2.5, 300};
  const Sizes sizes = {4, 3}, repeated = {0, 1}, transposed = {1, 4};
  std::vector<int16_t> found(12, 9);
  copy_strided({const_cast<double*>(row.data()), DType::kF64, sizes, repeated},
               {found.data(), DType::kI16, sizes, transposed});
  EXPECT_EQ(found, (std::vector<int16_t>{1, 1, 1, 1, -2, -2, -2, -2, 300, 300, 300, 300}));
}

TEST(StridedFill, WritesEveryElementAndNothingElse) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const Sizes sizes = draw_sizes(random);
    const Layout to = draw_layout(sizes, random);
    std::vector<double> found(static_cast<size_t>(to.reach), -1), expected = found;
    const double value = round + 0.5;
    for_each_index(sizes, [&](const Sizes& index) {
      expected[static_cast<size_t>(to.origin + offset_of(index, to.strides))] = value;
    });
    fill_strided(&value, {found.data() + to.origin, DType::kF64, sizes, to.strides});
    ASSERT_EQ(found, expected) << "round " << round;
  }
}

}  // namespace
}  // namespace chorale::vec
