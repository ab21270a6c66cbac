#include <limits>

#include "chorale/autograd/autograd.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"

namespace chorale {
namespace {

using testing::HasSubstr;

struct Side {
  int64_t kernel, stride, padding, dilation;
};

// PyTorch's documented size.
int64_t outputs(int64_t size, const Side& s, bool ceil_mode) {
  const double exact =
      static_cast<double>(size + 2 * s.padding - s.dilation * (s.kernel - 1) - 1) / static_cast<double>(s.stride) + 1;
  auto count = static_cast<int64_t>(ceil_mode ? std::ceil(exact) : std::floor(exact));
  if (ceil_mode && (count - 1) * s.stride >= size + s.padding) --count;
  return count;
}

struct Naive {
  Tensor max, index, with_padding, without_padding;
};
// Element by element, over [N, C, H, W].
Naive naive_pool(const Tensor& x, const Side& h, const Side& w, bool ceil_mode) {
  const Shape sizes{x.size(0), x.size(1), outputs(x.size(2), h, ceil_mode), outputs(x.size(3), w, ceil_mode)};
  enum { kMax, kIndex, kPadded, kInside };
  const auto pool = [&](int what) {
    return build(sizes, [&](const Shape& at_out) {
      double best = -std::numeric_limits<double>::infinity(), best_at = -1, sum = 0, padded = 0, inside = 0;
      for (int64_t i = 0; i < h.kernel; ++i) {
        for (int64_t j = 0; j < w.kernel; ++j) {
          const int64_t row = at_out[2] * h.stride - h.padding + i * h.dilation,
                        column = at_out[3] * w.stride - w.padding + j * w.dilation;
          if (row >= x.size(2) + h.padding || column >= x.size(3) + w.padding) continue;
          ++padded;
          if (row < 0 || column < 0 || row >= x.size(2) || column >= x.size(3)) continue;
          ++inside;
          const double value = at(x, {at_out[0], at_out[1], row, column});
          sum += value;
          if (value > best) best = value, best_at = static_cast<double>(row * x.size(3) + column);
        }
      }
      return what == kMax ? best : what == kIndex ? best_at : what == kPadded ? sum / padded : sum / inside;
    });
  };
  return {pool(kMax), pool(kIndex), pool(kPadded), pool(kInside)};
}

TEST(Pool, AgreesWithItsDefinitionInEveryLayout) {
  struct Case {
    Side h, w;
    bool ceil_mode;
  };
  for (const Case& c : {Case{{2, 2, 0, 1}, {2, 2, 0, 1}, false}, Case{{3, 2, 1, 1}, {3, 2, 1, 1}, true},
                        Case{{2, 1, 1, 1}, {3, 1, 1, 1}, false}, Case{{3, 3, 0, 1}, {5, 4, 2, 1}, true},
                        Case{{1, 1, 0, 1}, {4, 2, 1, 1}, false}}) {
    for (const Shape& sizes : {Shape{2, 3, 7, 9}, Shape{1, 17, 4, 6}, Shape{1, 2, 5, 67}}) {
      const Tensor x = op::sample(sizes);
      const Naive expected = naive_pool(x, c.h, c.w, c.ceil_mode);
      const IntList kernel{c.h.kernel, c.w.kernel}, stride{c.h.stride, c.w.stride}, padding{c.h.padding, c.w.padding};
      for (const Tensor& in : {x, channels_last(x), as(x, DType::kF32), channels_last(as(x, DType::kF32))}) {
        const double tolerance = in.dtype() == DType::kF64 ? 1e-13 : 1e-6;
        const auto [y, index] = max_pool2d_with_indices(in, kernel, stride, padding, 1, c.ceil_mode);
        expect_near(y, expected.max, tolerance);
        expect_near(index, expected.index, 0);
        EXPECT_EQ(y.is_channels_last(), in.is_channels_last());
        expect_near(avg_pool2d(in, kernel, stride, padding, c.ceil_mode), expected.with_padding, tolerance);
        expect_near(avg_pool2d(in, kernel, stride, padding, c.ceil_mode, false), expected.without_padding, tolerance);
      }
    }
  }
}

TEST(Pool, LeavesHolesWithDilation) {
  const Tensor x = op::sample({2, 3, 9, 40});
  for (const auto& [h, w] : {std::pair{Side{2, 1, 1, 3}, Side{3, 2, 2, 2}}, {Side{3, 2, 0, 2}, Side{2, 1, 1, 5}}}) {
    const Naive expected = naive_pool(x, h, w, false);
    for (const Tensor& in : {x, channels_last(x)}) {
      const auto [y, index] = max_pool2d_with_indices(in, {h.kernel, w.kernel}, {h.stride, w.stride},
                                                      {h.padding, w.padding}, {h.dilation, w.dilation});
      expect_near(y, expected.max, 0);
      expect_near(index, expected.index, 0);
    }
  }
}

TEST(Pool, NanWinsAndTheFirstOfEqualsIsNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const Tensor x = Tensor::from<double>({1, nan, 5, 5, -inf, -inf, 2, 5}, {1, 1, 8});
  const auto [y, index] = max_pool1d_with_indices(x, 2);
  EXPECT_TRUE(std::isnan(values(y)[0]));
  EXPECT_EQ((std::vector<double>{values(y)[1], values(y)[2], values(y)[3]}), (std::vector<double>{5, -inf, 5}));
  EXPECT_EQ(values(index), (std::vector<double>{1, 2, 4, 7}));
}

TEST(Pool, WorksWithoutABatchAndInOneDimension) {
  const Tensor x = iota<double>({2, 6});
  expect_tensor(max_pool1d(x, 3), {2, 2}, {2, 5, 8, 11});
  expect_tensor(avg_pool1d(x, 2, 2, 1), {2, 4}, {0, 1.5, 3.5, 2.5, 3, 7.5, 9.5, 5.5});
  expect_tensor(avg_pool1d(x, 2, 2, 1, false, false), {2, 4}, {0, 1.5, 3.5, 5, 6, 7.5, 9.5, 11});
  expect_tensor(max_pool2d(reshape(x, {1, 3, 4}), 2), {1, 1, 2}, {5, 7});
  expect_tensor(adaptive_max_pool1d(x, 4), {2, 4}, {1, 2, 4, 5, 7, 8, 10, 11});
  expect_tensor(avg_pool2d(reshape(x, {1, 3, 4}), 2, 2, 0, false, true, 2), {1, 1, 2}, {5, 9});
}

TEST(AdaptivePool, DividesTheInputEvenly) {
  const Tensor x = iota<double>({1, 1, 1, 7});
  expect_tensor(adaptive_avg_pool1d(reshape(x, {1, 1, 7}), 3), {1, 1, 3}, {1, 3, 5});
  const Tensor image = op::sample({2, 3, 5, 40});
  for (const Tensor& in :
       {image, channels_last(image), as(image, DType::kF32), channels_last(as(image, DType::kF32))}) {
    for (const auto& result : {std::pair<int64_t, int64_t>{1, 1}, {2, 3}, {5, 40}, {7, 50}}) {
      const int64_t height = result.first, width = result.second;  // clang 14 does not capture bindings
      const auto span = [](int64_t i, int64_t size, int64_t count) {
        return std::pair{i * size / count, ((i + 1) * size + count - 1) / count};
      };
      const auto reduce = [&](bool max) {
        return build({2, 3, height, width}, [&](const Shape& o) {
          const auto [top, bottom] = span(o[2], 5, height);
          const auto [left, right] = span(o[3], 40, width);
          double sum = 0, best = -1e9;
          for (int64_t h = top; h < bottom; ++h) {
            for (int64_t w = left; w < right; ++w)
              sum += at(in, {o[0], o[1], h, w}), best = std::max(best, at(in, {o[0], o[1], h, w}));
          }
          return max ? best : sum / static_cast<double>((bottom - top) * (right - left));
        });
      };
      expect_near(adaptive_avg_pool2d(in, {height, width}), reduce(false), 1e-6);
      expect_near(adaptive_max_pool2d(in, {height, width}), reduce(true), 0);
    }
  }
  EXPECT_EQ(adaptive_avg_pool2d(image, {-1, 2}).sizes(), (Shape{2, 3, 5, 2}));
}

// The gradient of a mean over all places is one number for each channel, and does not turn images that have their
// channels last.
TEST(AdaptivePool, GradientsOfAGlobalMeanKeepTheOrderOfTheImage) {
  const Tensor x = channels_last(op::sample({2, 3, 4, 5}, 1, 0.5, 2));
  set_requires_grad(x);
  const Tensor y = adaptive_avg_pool2d(relu(x), 1);
  const Tensor dx = grad({y}, {x}, {.grad_outputs = {ones(y.sizes(), y.dtype())}})[0];
  EXPECT_TRUE(dx.is_channels_last());
  EXPECT_EQ(dx.to_vector<double>(), std::vector<double>(120, 1.0 / 20));
}

// As in PyTorch: the window is larger than the image, and only what lies inside counts.
TEST(Pool, InCeilModeTheOnlyWindowMayReachBeyondTheImage) {
  const Tensor x = reshape(arange(0, 16, 1, DType::kF64), {1, 1, 4, 4});
  const Tensor largest = max_pool2d(x, 3, 2, 0, 2, true), mean = avg_pool2d(x, 5, 2, 0, true);
  EXPECT_EQ(largest.sizes(), (Shape{1, 1, 1, 1}));
  EXPECT_EQ(largest.item<double>(), 10);
  EXPECT_EQ(mean.sizes(), (Shape{1, 1, 1, 1}));
  EXPECT_EQ(mean.item<double>(), 7.5);
  const Tensor leaf = set_requires_grad(clone(x));
  backward(max_pool2d(leaf, 3, 2, 0, 2, true));
  std::vector<double> expected(16, 0);
  expected[10] = 1;
  EXPECT_EQ(gradient(leaf).to_vector<double>(), expected);
  EXPECT_THROW(max_pool2d(x, 3, 1, 0, 2, true), InvalidArgument);
}

TEST(Pool, RefusesWindowsThatDoNotFit) {
  const Tensor x = op::sample({1, 1, 4, 4});
  EXPECT_THAT(message_of([&] { max_pool2d(x, 5); }), HasSubstr("a window of 5 does not fit into a height of 4"));
  EXPECT_THAT(message_of([&] { max_pool2d(x, 2, 2, 2); }), HasSubstr("padding 2 of the height must be at most half"));
  EXPECT_THAT(message_of([&] { avg_pool2d(x, {2, 0}); }), HasSubstr("kernel 0"));
  EXPECT_THAT(message_of([&] { avg_pool2d(x, {2, 2, 2}); }), HasSubstr("1 or 2 entries, not [2, 2, 2]"));
  EXPECT_THAT(message_of([&] {
                max_pool2d(op::sample({4, 4}), 2);
              }),
              HasSubstr("[N, C, H, W] or [C, H, W], not [4, 4]"));
  EXPECT_THAT(message_of([&] { adaptive_avg_pool2d(x, 0); }), HasSubstr("0 x 0"));
  EXPECT_THAT(message_of([&] { avg_pool2d(x, 2, {}, 0, false, true, 0); }), HasSubstr("divisor_override"));
  EXPECT_THAT(message_of([&] {
                op::call(op::kMaxPoolBackward, kernel::AreaAttrs{2, 2}, op::sample({1, 1, 1, 1}),
                         Tensor::from<int64_t>({4}, {1, 1, 1, 1}));
              }),
              HasSubstr("index 4 is not within the 4 elements"));
}

}  // namespace
}  // namespace chorale
