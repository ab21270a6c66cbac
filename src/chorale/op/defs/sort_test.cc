#include <algorithm>
#include <cmath>
#include <numeric>

#include "chorale/op/defs/gradient_test_util.h"
#include "chorale/op/defs/layouts_test_util.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/order.h"
#include "chorale/op/pointwise.h"

namespace chorale {
namespace {

using testing::ElementsAre;

// Many equal elements, both signs, in no order.
Tensor shuffled(const Shape& sizes, DType dtype) {
  int64_t i = 0;
  return build(
      sizes, [&](const Shape&) { return static_cast<double>((++i * 7919 % 1009) % 61 - 30); }, dtype);
}

// Indices of a row in order, by comparing.
std::vector<int64_t> order_of(const std::vector<double>& row, bool descending) {
  std::vector<int64_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  const auto less = [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const double x = row[static_cast<size_t>(a)], y = row[static_cast<size_t>(b)];
    return descending ? less(y, x) : less(x, y);
  });
  return order;
}

// Calls f(row, values, indices) for all rows along dim, as vectors.
void for_each_row(const Tensor& x, const ValuesIndices& result, int64_t dim,
                  const std::function<void(std::vector<double>, std::vector<double>, std::vector<double>)>& f) {
  const auto rows = [&](const Tensor& t) { return reshape(movedim(t, dim, -1), {-1, t.size(dim)}); };
  const Tensor row = rows(x), value = rows(result.values), index = rows(result.indices);
  for (int64_t r = 0; r < row.size(0); ++r)
    f(values(select(row, 0, r)), values(select(value, 0, r)), values(select(index, 0, r)));
}

void expect_first_in_order(const Tensor& x, const ValuesIndices& result, int64_t dim, bool descending) {
  for_each_row(x, result, dim, [&](const auto& row, const auto& found, const auto& indices) {
    const auto order = order_of(row, descending);
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(indices[i], static_cast<double>(order[i])) << i;
      ASSERT_EQ(found[i], row[static_cast<size_t>(order[i])]) << i;
    }
  });
}

TEST(Sort, IsStableForEveryDTypeAndLayout) {
  for (DType dtype : kAllDTypes) {
    if (is_complex(dtype)) continue;
    for (const Tensor& x : layouts(shuffled({3, 300, 2}, dtype))) {
      SCOPED_TRACE(concat(dtype, " ", x.strides()));
      for (int64_t dim : {0, 1, 2}) {
        for (bool descending : {false, true}) expect_first_in_order(x, sort(x, dim, descending), dim, descending);
      }
    }
  }
}

TEST(Sort, PutsNanLastAndTreatsBothZerosAsEqual) {
  const Tensor x = Tensor::from<float>({NAN, 1, -0.f, 0, -NAN, -INFINITY, INFINITY}, {7});
  const auto [up, up_indices] = sort(x);
  EXPECT_THAT(values(up_indices), ElementsAre(5, 2, 3, 1, 6, 0, 4));
  EXPECT_TRUE(std::signbit(at(up, {1})));  // values are those of x, bit by bit
  EXPECT_TRUE(std::isnan(at(up, {6})));
  EXPECT_THAT(values(argsort(x, 0, true)), ElementsAre(0, 4, 6, 1, 2, 3, 5));
}

TEST(Sort, ExtremesOfIntegersKeepTheirPlaces) {
  const int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(sort(Tensor::from<int64_t>({0, high, low, -1}, {4})).values.to_vector<int64_t>(),
            (std::vector<int64_t>{low, -1, 0, high}));
  EXPECT_THAT(values(sort(Tensor::from<uint8_t>({0, 255, 128, 127}, {4})).values), ElementsAre(0, 127, 128, 255));
  EXPECT_THAT(values(sort(Tensor::from<bool>({true, false, true}, {3})).indices), ElementsAre(1, 0, 2));
}

TEST(Topk, AreTheFirstOfTheSorted) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kI64, DType::kF64}) {
    for (const Tensor& x : layouts(shuffled({2, 700, 3}, dtype))) {
      for (int64_t k : {0, 1, 2, 17, 170, 600, 700}) {
        for (bool largest : {false, true}) {
          SCOPED_TRACE(concat(dtype, " ", x.strides(), " k = ", k));
          const ValuesIndices result = topk(x, k, 1, largest);
          EXPECT_EQ(result.values.sizes(), (Shape{2, k, 3}));
          if (k > 0) expect_first_in_order(x, result, 1, largest);
        }
      }
    }
  }
  // The best come last, or first: every block, or none, is looked at closely.
  expect_first_in_order(iota({5000}), topk(iota({5000}), 10), 0, true);
  expect_first_in_order(iota({5000}), topk(iota({5000}), 10, 0, false), 0, false);
}

TEST(Topk, CountsNanAsLargest) {
  const Tensor x = Tensor::from<float>({NAN, 1, 3, 0, NAN, 2}, {6});
  EXPECT_THAT(values(topk(x, 3).indices), ElementsAre(0, 4, 2));
  EXPECT_THAT(values(topk(x, 5, -1, false).indices), ElementsAre(3, 1, 5, 2, 0));
}

TEST(Order, GradientsGoWhereValuesCameFrom) {
  const Tensor weights = vector({1, 10, 100});
  const auto weighted = [&](const Tensor& y) { return mul(y, narrow(weights, 0, 0, y.size(0))); };
  EXPECT_THAT(slope([&](const Tensor& x) { return weighted(sort(x).values); }, vector({5, 3, 4})),
              ElementsAre(100, 1, 10));
  EXPECT_THAT(slope([&](const Tensor& x) { return weighted(topk(x, 2).values); }, vector({5, 3, 4})),
              ElementsAre(1, 0, 10));
}

TEST(Unique, FindsDistinctValuesWithInverseAndCounts) {
  const auto [found, inverse, counts] = unique(Tensor::from<int32_t>({5, -2, 5, 7, -2, 5}, {2, 3}), true, true);
  expect_tensor(found, {3}, {-2, 5, 7});
  expect_tensor(inverse, {2, 3}, {1, 0, 1, 2, 0, 1});
  expect_tensor(counts, {3}, {2, 3, 1});
  const Unique plain = unique(iota({4}));
  expect_tensor(plain.values, {4}, {0, 1, 2, 3});
  EXPECT_EQ(plain.inverse.elems() + plain.counts.elems(), 0);
}

TEST(Unique, KeepsEveryNanAndOneZero) {
  const auto [found, inverse, counts] = unique(Tensor::from<float>({NAN, NAN, 1, -0.f, 0}, {5}), true, true);
  EXPECT_EQ(found.sizes(), Shape{4});
  expect_tensor(inverse, {5}, {2, 3, 1, 0, 0});
  expect_tensor(counts, {4}, {2, 1, 1, 1});
  const auto [none, no_inverse, no_counts] = unique(zeros({0, 2}), true, true);
  EXPECT_EQ(none.sizes(), Shape{0});
  EXPECT_EQ(no_inverse.sizes(), (Shape{0, 2}));
  EXPECT_EQ(no_counts.sizes(), Shape{0});
}

TEST(Searchsorted, FindsPlacesBeforeOrBehindEqualOnes) {
  const Tensor boundaries = Tensor::from<float>({1, 2, 2, 5}, {4});
  const Tensor x = Tensor::from<float>({0, 1, 2, 3, 5, 9}, {2, 3});
  expect_tensor(searchsorted(boundaries, x), {2, 3}, {0, 0, 1, 3, 3, 4});
  expect_tensor(searchsorted(boundaries, x, true), {2, 3}, {0, 1, 3, 3, 4, 4});
  const Tensor rows = Tensor::from<int64_t>({1, 3, 5, 2, 4, 6}, {2, 3});
  expect_tensor(searchsorted(rows, Tensor::from<int64_t>({3, 6, 3, 6}, {2, 2})), {2, 2}, {1, 3, 1, 2});
  expect_tensor(searchsorted(Tensor::from<float>({1, 2, NAN}, {3}), Tensor::from<float>({NAN, 5}, {2})), {2}, {3, 2});
  expect_tensor(searchsorted(iota<int64_t>({4}), Tensor::from<float>({1.5f}, {1})), {1}, {2});  // promoted
  EXPECT_THAT(message_of([&] { searchsorted(rows, zeros({3, 3})); }), testing::HasSubstr("[2, 3] and [3, 3]"));
}

TEST(Bincount, CountsOrAddsWeights) {
  const Tensor x = Tensor::from<int32_t>({1, 1, 3}, {3});
  expect_tensor(bincount(x), {4}, {0, 2, 0, 1});
  expect_tensor(bincount(x, Tensor::from<float>({1, 2, 3}, {3}), 6), {6}, {0, 3, 0, 3, 0, 0});
  EXPECT_EQ(bincount(x, Tensor::from<float>({1, 2, 3}, {3})).dtype(), DType::kF32);
  EXPECT_EQ(bincount(x, Tensor::from<int64_t>({1, 2, 3}, {3})).dtype(), DType::kF64);
  expect_tensor(bincount(zeros({0}, DType::kI64), {}, 3), {3}, {0, 0, 0});
  EXPECT_EQ(message_of([&] {
              bincount(Tensor::from<int64_t>({1, -1}, {2}));
            }),
            "[bincount] counts non-negative integers, but element 1 is -1");
  EXPECT_THROW(bincount(zeros({2, 2}, DType::kI64)), InvalidArgument);
  EXPECT_THROW(bincount(x, zeros({2})), InvalidArgument);
}

TEST(Order, BadInputIsNamed) {
  EXPECT_EQ(message_of([&] {
              topk(zeros({2, 3}), 4);
            }),
            "[topk] k is 4, but dimension -1 of shape [2, 3] has 3 elements");
  EXPECT_THAT(message_of([&] { sort(zeros({2}), 1); }), testing::HasSubstr("[sort]"));
  EXPECT_THAT(message_of([&] { sort(zeros({2}, DType::kC64)); }), testing::HasSubstr("[sort] is not defined for c64"));
  expect_tensor(sort(Tensor::scalar(2, DType::kF32)).values, {}, {2});
  expect_tensor(topk(Tensor::scalar(2, DType::kF32), 1).values, {}, {2});
  EXPECT_EQ(sort(zeros({3, 0})).values.sizes(), (Shape{3, 0}));
  EXPECT_EQ(sort(zeros({3, 0}), 0).values.sizes(), (Shape{3, 0}));
}

}  // namespace
}  // namespace chorale
