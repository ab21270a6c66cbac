#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "chorale/vec/loops.h"

namespace chorale::vec {
namespace {

constexpr size_t kElementSizes[] = {1, 2, 4, 8, 16};

std::vector<uint8_t> numbered(size_t bytes) {
  std::vector<uint8_t> values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<uint8_t>(i * 7 + i / 251);
  return values;
}

TEST(Move, FillWritesEveryElementAndNothingElse) {
  const std::vector<uint8_t> value = numbered(16);
  for (size_t elem : kElementSizes) {
    for (size_t n : {0, 1, 3, 17, 100}) {
      std::vector<uint8_t> out((n + 2) * elem, 0xa5);
      fill(out.data() + elem, value.data(), elem, static_cast<int64_t>(n));
      for (size_t i = 0; i < out.size(); ++i) {
        const bool inside = i >= elem && i < (n + 1) * elem;
        ASSERT_EQ(out[i], inside ? value[i % elem] : 0xa5) << elem << " " << n << " " << i;
      }
    }
  }
}

TEST(Move, GatherAndScatterFollowAnyStride) {
  for (size_t elem : kElementSizes) {
    const auto size = static_cast<int64_t>(elem);
    for (int64_t stride : {size, 2 * size, 3 * size, -size, -2 * size, int64_t{0}}) {
      for (int64_t n : {0, 1, 2, 16, 33}) {
        const std::vector<uint8_t> memory = numbered(200 * elem);
        const int64_t origin = 100 * size;
        std::vector<uint8_t> gathered(static_cast<size_t>(n) * elem);
        gather_strided(memory.data() + origin, stride, gathered.data(), n, elem);
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(std::memcmp(gathered.data() + i * size, memory.data() + origin + i * stride, elem), 0)
              << elem << " " << stride << " " << i;
        }
        if (stride == 0) continue;
        std::vector<uint8_t> scattered(memory.size(), 0);
        scatter_strided(gathered.data(), scattered.data() + origin, stride, n, elem);
        std::vector<uint8_t> expected(memory.size(), 0);
        for (int64_t i = 0; i < n; ++i) {
          std::memcpy(expected.data() + origin + i * stride, memory.data() + origin + i * stride, elem);
        }
        ASSERT_EQ(scattered, expected) << elem << " " << stride << " " << n;
      }
    }
  }
}

TEST(Move, TransposeOfAnyShapeTouchesOnlyItsElements) {
  constexpr int64_t kShapes[][2] = {{0, 5},   {1, 1},   {1, 70},   {70, 1},   {3, 5},
                                    {16, 16}, {64, 64}, {65, 130}, {128, 31}, {300, 270}};
  for (size_t elem : kElementSizes) {
    const auto size = static_cast<int64_t>(elem);
    for (const auto& [rows, cols] : kShapes) {
      const int64_t in_stride = (cols + 3) * size, out_stride = (rows + 5) * size;
      const std::vector<uint8_t> in = numbered(static_cast<size_t>(rows * in_stride));
      std::vector<uint8_t> out(static_cast<size_t>(cols * out_stride), 0xa5), expected = out;
      transpose_copy(in.data(), in_stride, out.data(), out_stride, rows, cols, elem);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          std::memcpy(expected.data() + c * out_stride + r * size, in.data() + r * in_stride + c * size, elem);
        }
      }
      ASSERT_TRUE(out == expected) << "transpose " << rows << " x " << cols << " of " << elem;
    }
  }
}

}  // namespace
}  // namespace chorale::vec
