#include "chorale/op/reduce.h"

#include <cmath>
#include <limits>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/layouts_test_util.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Folds with f, one element after the other, in row-major order.
Tensor naive(const Tensor& x, const IntList& dims, bool keepdim, DType dtype, double first,
             const std::function<double(double, double)>& f) {
  const kernel::DimMask reduced = kernel::dim_mask("naive", dims, x.dims());
  const Shape sizes = kernel::reduced_shape(x.sizes(), reduced, false);
  const Strides strides = contiguous_strides(sizes);
  std::vector<double> results(static_cast<size_t>(count_elems(sizes)), first);
  for_each_index(x.sizes(), [&](const Shape& index) {
    int64_t to = 0;
    for (size_t d = 0, kept = 0; d < index.size(); ++d) {
      if (!(reduced >> d & 1u)) to += index[d] * strides[kept++];
    }
    double& result = results[static_cast<size_t>(to)];
    result = f(result, at(x, index));
  });
  size_t next = 0;
  return build(
      kernel::reduced_shape(x.sizes(), reduced, keepdim), [&](const Shape&) { return results[next++]; }, dtype);
}

// Integers from -3 to 3, different from their neighbours: sums are exact whatever the order.
Tensor small_integers(const Shape& sizes, DType dtype = DType::kF32) {
  int64_t i = 0;
  return build(
      sizes, [&](const Shape&) { return static_cast<double>(i++ * 37 % 7 - 3); }, dtype);
}

TEST(Reduce, SumOverAnyDimensionsOfAnyLayoutIsTheNaiveSum) {
  RandomShapes random(7);
  for (int round = 0; round < 200; ++round) {
    const Shape sizes = random.shape(5);
    const auto rank = static_cast<int64_t>(sizes.size());
    IntList dims;
    for (int64_t d = 0; d < rank; ++d) {
      if (random.pick(0, 1)) dims.values[dims.count++] = random.pick(0, 1) ? d : d - rank;
    }
    const bool keepdim = random.pick(0, 1);
    for (const Tensor& x : layouts(small_integers(sizes))) {
      SCOPED_TRACE(concat(sizes, " ", x.strides(), " over ", dims.shape()));
      expect_equal(sum(x, dims, keepdim), naive(x, dims, keepdim, DType::kF32, 0, std::plus<>()));
    }
  }
}

TEST(Reduce, EveryKindOfLoopGivesTheNaiveResultsForEveryDType) {
  // Long rows, long columns, short rows, short columns, a dimension in the middle.
  const struct {
    Shape sizes;
    IntList dims;
  } cases[] = {{{3, 700}, {1}},  {{300, 40}, {0}},       {{200, 3}, {1}},       {{900, 3}, {0}},
               {{70, 9}, {}},    {{4, 20, 30}, {1}},     {{4, 20, 30}, {0, 2}}, {{20, 5, 7}, {0, 2}},
               {{2, 1100}, {0}}, {{7, 3, 11, 5}, {1, 3}}};
  for (const auto& [sizes, dims] : cases) {
    for (DType dtype : kAllDTypes) {
      for (const Tensor& x : layouts(small_integers(sizes, dtype))) {
        SCOPED_TRACE(concat(sizes, " ", x.strides(), " ", dtype, " over ", dims.shape()));
        const DType counted = is_differentiable(dtype) ? dtype : DType::kI64;
        expect_equal(sum(x, dims), naive(x, dims, false, counted, 0, std::plus<>()));
        expect_equal(count_nonzero(x, dims),
                     naive(x, dims, false, DType::kI64, 0, [](double a, double b) { return a + (b != 0 ? 1 : 0); }));
        expect_equal(any(x, dims),
                     naive(x, dims, false, DType::kBool, 0, [](double a, double b) { return a != 0 || b != 0; }));
        if (is_complex(dtype)) continue;
        expect_equal(amax(x, dims, true),
                     naive(x, dims, true, dtype, -kInf, [](double a, double b) { return std::max(a, b); }));
        expect_equal(amin(x, dims),
                     naive(x, dims, false, dtype, kInf, [](double a, double b) { return std::min(a, b); }));
      }
    }
  }
}

TEST(Reduce, LongReductionsAreCutIntoBlocksWithoutLosingAnything) {
  for (const Shape& sizes : {Shape{300000}, Shape{2, 300000}, Shape{300000, 2}, Shape{20000, 33}, Shape{33, 20000}}) {
    const Tensor x = small_integers(sizes);
    double total = 0;
    for (double value : values(x)) total += value;
    EXPECT_EQ(sum(x).item<double>(), total) << sizes;
    for (int64_t d = 0; d < x.dims(); ++d) EXPECT_EQ(sum(sum(x, d)).item<double>(), total) << sizes << " " << d;
    EXPECT_EQ(amax(x).item<double>(), 3);
  }
  // Channels of images: the rows of one result lie apart.
  const Tensor images = small_integers({50, 5, 900});
  expect_equal(sum(images, {0, 2}), naive(images, {0, 2}, false, DType::kF32, 0, std::plus<>()));
}

TEST(Reduce, MeanDividesInHigherPrecision) {
  // Sums of 16-bit floats out of their range, means inside.
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    EXPECT_EQ(mean(full({1000}, 40960, dtype)).item<double>(), 40960);
    EXPECT_EQ(sum(ones({5000}, dtype)).item<double>(), dtype == DType::kF16 ? 5000 : 4992);  // the nearest bf16 to 5000
    EXPECT_EQ(sum(ones({5001}, dtype), {}, false, DType::kF32).item<double>(), 5001);
  }
  expect_tensor(mean(Tensor::from<float>({1, 2, 3, 4, 5, 9}, {2, 3}), 1), {2}, {2, 6});
  expect_tensor(mean(Tensor::from<int32_t>({1, 2}, {2}), {}, false, DType::kF64), {}, {1.5});
  EXPECT_EQ(mean(Tensor::from<complex64>({{1, 2}, {3, 6}}, {2})).item<complex64>(), complex64(2, 4));
}

TEST(Reduce, ErrorsOfSumsDoNotGrowWithTheirLength) {
  // The worst case for adding one after the other: equal terms whose rounding errors all have one sign.
  const int64_t n = int64_t{1} << 22;
  const Tensor x = full({n}, 0.1f);
  const double exact = static_cast<double>(0.1f) * static_cast<double>(n);
  const auto error = [&](const Tensor& sum) { return std::abs(sum.item<double>() - exact) / exact; };
  EXPECT_LT(error(sum(x)), 1e-6);
  EXPECT_LT(error(select(sum(view(x, {n, 1}), 0), 0, 0)), 1e-6);
  EXPECT_LT(error(select(sum(expand(view(x, {n, 1}), {n, 16}), 0), 0, 3)), 1e-6);  // columns
  EXPECT_LT(error(sum(slice(full({2 * n}, 0.1f), 0, 0, kEnd, 2))), 1e-6);          // gathered
  // Many short runs, one after the other.
  EXPECT_LT(error(select(sum(permute(view(x, {n / 32, 1, 32}), {1, 0, 2}), {1, 2}), 0, 0)), 1e-6);
  EXPECT_LT(error(sum(slice(full({n / 16, 32}, 0.1f), 1, 0, 16))), 1e-6);
}

TEST(Reduce, ResultsDoNotDependOnTheNumberOfThreads) {
  const int before = thread_count();
  int64_t i = 0;
  for (const Shape& sizes :
       {Shape{1 << 20}, Shape{1 << 14, 70}, Shape{70, 1 << 14}, Shape{1 << 18, 3}, Shape{64, 9, 300}}) {
    const Tensor x = build(
        sizes, [&](const Shape&) { return std::sin(static_cast<double>(++i)); }, DType::kF32);
    for (const IntList& dims : {IntList{}, IntList{0}, IntList{-1}}) {
      std::vector<std::vector<double>> found;
      for (int threads : {1, 2, 3, 7}) {
        set_thread_count(threads);
        found.push_back(values(sum(x, dims)));
        EXPECT_EQ(found.back(), found.front()) << sizes << " over " << dims.shape() << " on " << threads;
      }
    }
  }
  set_thread_count(before);
}

TEST(Reduce, NothingGivesTheNeutralElementOrAnError) {
  const Tensor x = zeros({2, 0});
  expect_tensor(sum(x, 1), {2}, {0, 0});
  expect_tensor(prod(x, 1), {2}, {1, 1});
  expect_tensor(sum(x, 0), {0}, {});
  expect_tensor(any(x, 1), {2}, {0, 0});
  expect_tensor(all(x, 1), {2}, {1, 1});
  EXPECT_TRUE(std::isnan(mean(x).item<double>()));
  EXPECT_EQ(message_of([&] { amax(x, 1); }),
            "[amax] nothing has no extreme: a reduced dimension of shape [2, 0] has size 0");
}

TEST(Reduce, ScalarsReduceToThemselves) {
  const Tensor x = Tensor::scalar(3, DType::kF32);
  for (const IntList& dims : {IntList{}, IntList{0}, IntList{-1}}) {
    expect_tensor(sum(x, dims), {}, {3});
    expect_tensor(amax(x, dims, true), {}, {3});
  }
}

TEST(Reduce, DtypeOptionConvertsWhereNothingIsLost) {
  const Tensor x = Tensor::from<float>({1.5f, 1.5f}, {2});
  EXPECT_EQ(sum(x, {}, false, DType::kI64).item<int64_t>(), 2);  // truncated one by one
  EXPECT_EQ(sum(x, {}, false, DType::kF64).dtype(), DType::kF64);
  EXPECT_EQ(sum(Tensor::from<int8_t>({100, 100}, {2})).item<int64_t>(), 200);
  EXPECT_EQ(sum(Tensor::from<int8_t>({100, 100}, {2}), {}, false, DType::kI8).item<int64_t>(), -56);
  EXPECT_EQ(sum(Tensor::from<bool>({true, false, true}, {3})).item<int64_t>(), 2);
  EXPECT_EQ(prod(Tensor::from<int32_t>({1 << 20, 1 << 20}, {2})).item<int64_t>(), int64_t{1} << 40);
  EXPECT_EQ(cumsum(Tensor::from<bool>({true, true}, {2}), 0).dtype(), DType::kI64);
  EXPECT_THROW(sum(Tensor::from<complex64>({{1, 1}}, {1}), {}, false, DType::kF32), InvalidArgument);
}

TEST(Reduce, SumToInvertsBroadcasting) {
  const Tensor x = iota({2, 3, 4});
  expect_tensor(sum_to(x, {3, 1}), {3, 1}, {60, 92, 124});
  expect_tensor(sum_to(x, {}), {}, {276});
  expect_tensor(sum_to(x, {1, 1, 4}), {1, 1, 4}, {60, 66, 72, 78});
  EXPECT_TRUE(sum_to(x, {2, 3, 4}).is(x));
  EXPECT_EQ(message_of([&] { sum_to(x, {2, 4}); }), "[sum_to] [2, 4] does not broadcast to [2, 3, 4]");
  EXPECT_THROW(sum_to(x, {1, 2, 3, 4}), InvalidArgument);
}

TEST(Reduce, BadInputIsNamed) {
  const Tensor x = iota({2, 3});
  EXPECT_THAT(message_of([&] { sum(x, {2}); }), testing::HasSubstr("[sum]"));
  EXPECT_EQ(message_of([&] { sum(x, {0, -2}); }), "[sum] dimension -2 is named twice in [0, -2]");
  EXPECT_THAT(message_of([&] { mean(iota<int64_t>({3})); }), testing::HasSubstr("[mean] of i64 elements as i64"));
  EXPECT_THAT(message_of([&] { amax(Tensor::from<complex64>({{1, 1}}, {1})); }), testing::HasSubstr("[amax]"));
}

}  // namespace
}  // namespace chorale
