#include "chorale/kernel/cpu/support/copy.h"

#include <gtest/gtest.h>

#include "chorale/base/parallel_for.h"

namespace chorale::kernel::cpu {
namespace {

Tensor counted(const Shape& sizes, DType dtype) {
  const Tensor x = Tensor::empty(sizes, dtype);
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    int64_t at = 0;
    for (T& value : x.span<T>()) value = Scalar(at++ % 101).to<T>();
  });
  return x;
}

// The same bytes under other sizes and strides.
struct View {
  const char* name;
  Shape base, sizes;
  Strides strides;
  int64_t offset = 0;
};
const View kViews[] = {
    {"contiguous", {3, 5, 70}, {3, 5, 70}, {350, 70, 1}},
    {"one element", {1}, {}, {}},
    {"empty", {0, 3}, {0, 3}, {3, 1}},
    {"transposed matrix", {67, 45}, {45, 67}, {1, 45}},
    {"transposed vector of pairs", {2, 90}, {90, 2}, {1, 90}},
    {"channels last", {2, 5, 6, 7}, {2, 7, 5, 6}, {210, 1, 42, 7}},
    {"every second column", {9, 20}, {9, 10}, {20, 2}, 1},
    {"a block with long rows", {40, 300}, {20, 130}, {300, 1}, 77},
    {"a block with short rows", {400, 9}, {400, 3}, {9, 1}, 2},
    {"expanded rows", {50}, {70, 50}, {0, 1}},
    {"expanded columns", {70}, {70, 50}, {1, 0}},
    {"batch of transposed", {3, 33, 40}, {3, 40, 33}, {1320, 1, 40}},
    {"two threads", {300, 400}, {400, 300}, {1, 400}},
    {"rank eight", {2, 2, 2, 2, 2, 2, 2, 3}, {3, 2, 2, 2, 2, 2, 2, 2}, {1, 192, 96, 48, 24, 12, 6, 3}},
};

Tensor view_of(const View& view, DType dtype) {
  return counted(view.base, dtype).view_as(view.sizes, view.strides, view.offset);
}

TEST(Copy, TakesEveryLayoutToContiguousInEveryDType) {
  for (const View& view : kViews) {
    for (DType from : kAllDTypes) {
      const Tensor x = view_of(view, from);
      const Tensor y = contiguous(x);
      EXPECT_TRUE(y.is_contiguous());
      EXPECT_EQ(y.dtype(), from);
      EXPECT_EQ(y.to_vector<complex128>(), x.to_vector<complex128>()) << view.name << " " << from;
    }
  }
}

TEST(Copy, ConvertsBetweenAllPairsOfDTypesInEveryLayout) {
  for (const View& view : kViews) {
    for (DType from : kAllDTypes) {
      const Tensor x = view_of(view, from);
      for (DType to : kAllDTypes) {
        // Values up to 100 are exact everywhere but in bool.
        std::vector<double> expected = x.to_vector<double>();
        if (to == DType::kBool) {
          for (double& value : expected) value = value != 0;
        }
        EXPECT_EQ(contiguous(x, to).to_vector<double>(), expected) << view.name << " " << from << " to " << to;
      }
    }
  }
}

TEST(Copy, WritesEveryLayoutAndNothingBesideIt) {
  for (const View& view : kViews) {
    if (std::find(view.strides.begin(), view.strides.end(), 0) != view.strides.end()) continue;  // cannot be written
    for (DType from : {DType::kF32, DType::kU8, DType::kC128}) {
      for (DType to : {DType::kF32, DType::kI16, DType::kC128}) {
        const Tensor base = counted(view.base, to);
        std::vector<complex128> expected = base.to_vector<complex128>();
        const Tensor target = base.view_as(view.sizes, view.strides, view.offset);
        const Tensor source = counted(view.sizes, from);
        copy_into(source, target);
        EXPECT_EQ(target.to_vector<complex128>(), source.to_vector<complex128>()) << view.name;
        // What the view does not show has kept its values.
        const Tensor shown = Tensor::from(std::vector<int64_t>(expected.size(), 0), view.base);
        const Tensor marks = shown.view_as(view.sizes, view.strides, view.offset);
        copy_into(contiguous(Tensor::scalar(1, DType::kI64).view_as(view.sizes, Strides(view.sizes.size(), 0), 0)),
                  marks);
        const auto is_shown = shown.to_vector<int64_t>();
        const auto found = base.to_vector<complex128>();
        for (size_t i = 0; i < found.size(); ++i) {
          if (!is_shown[i]) {
            EXPECT_EQ(found[i], expected[i]) << view.name << " at " << i;
          }
        }
      }
    }
  }
}

TEST(Copy, OfContiguousTensorsIsTheTensorItself) {
  const Tensor x = counted({2, 3}, DType::kF32);
  EXPECT_TRUE(contiguous(x).is(x));
  EXPECT_TRUE(contiguous(x, DType::kF32).is(x));
}

TEST(Copy, IsTheSameForAnyThreadCount) {
  const Tensor x = counted({500, 600}, DType::kF32).view_as({600, 500}, {1, 600}, 0);
  const std::vector<float> expected = x.to_vector<float>();
  const int before = thread_count();
  for (int threads : {1, 2, 5}) {
    set_thread_count(threads);
    EXPECT_EQ(contiguous(x).to_vector<float>(), expected);
  }
  set_thread_count(before);
}

}  // namespace
}  // namespace chorale::kernel::cpu
