#include <cmath>

#include "chorale/op/defs/gradient_test_util.h"
#include "chorale/op/defs/layouts_test_util.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/reduce.h"

namespace chorale {
namespace {

using testing::ElementsAre;

TEST(Pick, NanWinsAmongExtremes) {
  const Tensor x = Tensor::from<float>({1, NAN, 3, 4, 5, 6}, {2, 3});
  EXPECT_TRUE(std::isnan(amax(x).item<double>()));
  EXPECT_TRUE(std::isnan(amin(x).item<double>()));
  EXPECT_EQ(argmax(x).item<int64_t>(), 1);
  EXPECT_EQ(argmin(x).item<int64_t>(), 1);
  expect_tensor(max(x, 1).indices, {2}, {1, 2});
  expect_tensor(max(x, 0).indices, {3}, {1, 0, 1});
  expect_tensor(argmin(x, 0), {3}, {0, 0, 0});
}

TEST(Pick, IndicesAreThoseOfTheFirstExtreme) {
  expect_tensor(argmax(Tensor::from<int64_t>({1, 7, 7, 0}, {4})), {}, {1});
  const Tensor x = Tensor::from<float>({5, 1, 5, 2, 9, 2}, {2, 3});
  const auto [values, indices] = max(x, -1, true);
  expect_tensor(values, {2, 1}, {5, 9});
  expect_tensor(indices, {2, 1}, {0, 1});
  expect_tensor(min(x, 0).values, {3}, {2, 1, 2});
  expect_tensor(min(x, 0).indices, {3}, {1, 0, 1});
  expect_tensor(argmax(x, {}, true), {1, 1}, {4});
}

TEST(Pick, IndicesOfLargeTensorsInAnyLayoutPointToTheExtreme) {
  for (const Shape& sizes : {Shape{1000, 37}, Shape{37, 1000}, Shape{3, 300, 50}, Shape{100000}}) {
    const int64_t n = count_elems(sizes);
    int64_t i = 0;  // all different
    const Tensor base = build(
        sizes, [&](const Shape&) { return static_cast<double>(++i * 7919 % 100003 % n); }, DType::kF32);
    for (const Tensor& x : layouts(base)) {
      for (int64_t dim = 0; dim < x.dims(); ++dim) {
        const ValuesIndices found = max(x, dim);
        const Tensor &values = found.values, &indices = found.indices;  // clang 14 does not capture bindings
        expect_equal(values, amax(x, dim));
        expect_equal(argmax(x, dim), indices);
        for_each_index(indices.sizes(), [&](const Shape& index) {
          Shape there = index;
          there.insert(static_cast<size_t>(dim), static_cast<int64_t>(at(indices, index)));
          EXPECT_EQ(at(x, there), at(values, index));
        });
      }
      EXPECT_EQ(at(reshape(x, {-1}), {argmax(x).item<int64_t>()}), amax(x).item<double>());
      EXPECT_EQ(at(reshape(x, {-1}), {argmin(x).item<int64_t>()}), amin(x).item<double>());
    }
  }
}

TEST(Pick, ShareTheirGradientOrGiveItToTheFirst) {
  EXPECT_THAT(slope([](const Tensor& x) { return amax(x); }, vector({3, 1, 3})), ElementsAre(0.5, 0, 0.5));
  EXPECT_THAT(slope([](const Tensor& x) { return max(x, 0).values; }, vector({3, 1, 3})), ElementsAre(1, 0, 0));
  const Tensor x = Tensor::from<double>({1, 5, 2, 7, 0, 9}, {2, 3});
  EXPECT_THAT(slope([](const Tensor& y) { return min(y, 1).values; }, x), ElementsAre(1, 0, 0, 0, 1, 0));
  EXPECT_THAT(slope([](const Tensor& y) { return mean(y, 1); }, x),
              testing::ElementsAreArray(std::vector<double>(6, 1. / 3)));
}

TEST(Pick, BadInputIsNamed) {
  EXPECT_EQ(message_of([&] {
              max(zeros({2, 0}), 1);
            }),
            "[max] nothing has no extreme: a reduced dimension of shape [2, 0] has size 0");
  EXPECT_THROW(argmin(zeros({2, 0})), InvalidArgument);
  EXPECT_EQ(argmax(zeros({2, 0}), 0).sizes(), Shape{0});
  EXPECT_THAT(message_of([&] { max(zeros({2, 3}), 5); }), testing::HasSubstr("[max]"));
  EXPECT_THAT(message_of([&] { argmax(zeros({2}, DType::kC64)); }),
              testing::HasSubstr("[argmax] is not defined for c64"));
}

TEST(Pick, AScalarIsItsOwnExtreme) { expect_tensor(max(Tensor::scalar(3, DType::kF32), 0).indices, {}, {0}); }

}  // namespace
}  // namespace chorale
