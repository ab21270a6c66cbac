#include "chorale/kernel/cpu/convolution/convolution_engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/base/same_bits.h"
#include "chorale/kernel/cpu/dnnl/primitive.h"

namespace chorale::kernel::cpu {
namespace {

// Eighths between -1 and 1: exact in every floating dtype.
double value(int64_t i) { return static_cast<double>((i * 37 + 11) % 17 - 8) / 8; }

template <class T>
std::vector<T> values(int64_t count, int64_t seed) {
  std::vector<T> x;
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (is_half(dtype_of<T>)) {
      x.push_back(T(static_cast<float>(value(i + seed))));
    } else {
      x.push_back(static_cast<T>(value(i + seed)));
    }
  }
  return x;
}

template <class T>
double widen(T x) {
  return static_cast<double>(static_cast<std::conditional_t<is_half(dtype_of<T>), float, T>>(x));
}

template <class T>
std::vector<double> widen(const std::vector<T>& x) {
  std::vector<double> result;
  result.reserve(x.size());
  for (const T& element : x) result.push_back(widen(element));
  return result;
}

int64_t volume(const std::array<int64_t, 3>& size, int spatial) {
  int64_t product = 1;
  for (int i = 0; i < spatial; ++i) product *= size[static_cast<size_t>(i)];
  return product;
}

// Where the element of an image, channel and position lies.
int64_t offset(const Convolution& c, int64_t channels, int64_t positions, int64_t image, int64_t channel,
               int64_t position) {
  return c.channels_last ? (image * positions + position) * channels + channel
                         : (image * channels + channel) * positions + position;
}

// Calls body(x offset, w offset, y offset, out channel) for each multiplication that the definition asks for.
template <class Body>
void each_product(const Convolution& c, Body&& body) {
  const int64_t in = volume(c.in, c.spatial), out = volume(c.out, c.spatial), kernel = volume(c.kernel, c.spatial);
  const int64_t ci = c.in_channels / c.groups, co = c.out_channels / c.groups;
  for (int64_t position = 0; position < out; ++position) {
    for (int64_t tap = 0; tap < kernel; ++tap) {
      int64_t from = 0, scale = 1, rest_out = position, rest_tap = tap;
      bool inside = true;
      for (int d = c.spatial - 1; d >= 0; --d) {
        const auto i = static_cast<size_t>(d);
        const int64_t at = rest_out % c.out[i] * c.stride[i] - c.pad[i] + rest_tap % c.kernel[i] * c.dilation[i];
        rest_out /= c.out[i];
        rest_tap /= c.kernel[i];
        inside = inside && at >= 0 && at < c.in[i];
        from += at * scale;
        scale *= c.in[i];
      }
      if (!inside) continue;
      for (int64_t image = 0; image < c.batch; ++image) {
        for (int64_t o = 0; o < c.out_channels; ++o) {
          for (int64_t i = 0; i < ci; ++i) {
            body(offset(c, c.in_channels, in, image, o / co * ci + i, from), (o * ci + i) * kernel + tap,
                 offset(c, c.out_channels, out, image, o, position));
          }
        }
      }
    }
  }
}

template <class T>
void expect_near(const std::vector<T>& found, const std::vector<double>& expected, double tolerance, const char* what) {
  ASSERT_EQ(found.size(), expected.size());
  double largest = 1;
  for (const double x : expected) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < found.size(); ++i) {
    // Written so that NaN fails.
    ASSERT_TRUE(std::abs(widen(found[i]) - expected[i]) <= tolerance * largest)
        << what << "[" << i << "]: " << widen(found[i]) << ", expected " << expected[i];
  }
}

// All three passes, with and without bias, against the definition. Results start as NaN: they must be overwritten.
template <class T>
void check(Convolution c, double tolerance) {
  c.dtype = dtype_of<T>;
  SCOPED_TRACE(concat("dtype ", c.dtype, " spatial ", c.spatial, " batch ", c.batch, " groups ", c.groups, " channels ",
                      c.in_channels, " -> ", c.out_channels, " in ", c.in[0], "x", c.in[1], "x", c.in[2], " kernel ",
                      c.kernel[0], "x", c.kernel[1], "x", c.kernel[2], " stride ", c.stride[0], " pad ", c.pad[0],
                      " dilation ", c.dilation[0], " channels_last ", c.channels_last));
  const auto at = [](auto& x, int64_t i) -> auto& { return x[static_cast<size_t>(i)]; };
  const int64_t out = volume(c.out, c.spatial);
  const auto x = values<T>(c.batch * c.in_channels * volume(c.in, c.spatial), 1);
  const auto w = values<T>(c.out_channels * (c.in_channels / c.groups) * volume(c.kernel, c.spatial), 2);
  const auto dy = values<T>(c.batch * c.out_channels * out, 3);
  const auto bias = values<T>(c.out_channels, 4);
  const std::vector<double> wide_x = widen(x), wide_w = widen(w), wide_dy = widen(dy);
  std::vector<double> y(dy.size()), dx(x.size()), dw(w.size()), dbias(bias.size());
  each_product(c, [&](int64_t i, int64_t j, int64_t k) {
    at(y, k) += at(wide_x, i) * at(wide_w, j);
    at(dx, i) += at(wide_dy, k) * at(wide_w, j);
    at(dw, j) += at(wide_dy, k) * at(wide_x, i);
  });
  std::vector<double> biased = y;
  for (int64_t image = 0; image < c.batch; ++image) {
    for (int64_t o = 0; o < c.out_channels; ++o) {
      for (int64_t p = 0; p < out; ++p) {
        const int64_t i = offset(c, c.out_channels, out, image, o, p);
        at(biased, i) += widen(at(bias, o));
        at(dbias, o) += at(wide_dy, i);
      }
    }
  }
  const T nan(std::numeric_limits<float>::quiet_NaN());
  const auto fresh = [&](const auto& like) { return std::vector<T>(like.size(), nan); };
  auto found_y = fresh(y), found_biased = fresh(y), found_dx = fresh(dx), found_dw = fresh(dw),
       found_dw_alone = fresh(dw), found_dbias = fresh(dbias), found_dbias_alone = fresh(dbias);
  convolution_forward(c, x.data(), w.data(), nullptr, found_y.data());
  convolution_forward(c, x.data(), w.data(), bias.data(), found_biased.data());
  convolution_backward_data(c, dy.data(), w.data(), found_dx.data());
  convolution_backward_weights(c, x.data(), dy.data(), found_dw.data(), found_dbias.data());
  convolution_backward_weights(c, x.data(), dy.data(), found_dw_alone.data(), nullptr);
  convolution_backward_weights(c, x.data(), dy.data(), nullptr, found_dbias_alone.data());
  expect_near(found_y, y, tolerance, "y");
  expect_near(found_biased, biased, tolerance, "y with bias");
  expect_near(found_dx, dx, tolerance, "dx");
  expect_near(found_dw, dw, tolerance, "dw");
  expect_near(found_dw_alone, dw, tolerance, "dw alone");
  expect_near(found_dbias, dbias, tolerance, "dbias");
  expect_near(found_dbias_alone, dbias, tolerance, "dbias alone");
}

// Relative to the largest element: a few units in the last place.
constexpr double kF32 = 1e-6, kF64 = 1e-14, kBF16 = 1.0 / 128, kF16 = 1.0 / 1024;

void check_both(const Convolution& c) {
  for (const bool channels_last : {false, true}) {
    Convolution variant = c;
    variant.channels_last = channels_last;
    check<float>(variant, kF32);
    check<double>(variant, kF64);
  }
}

// The size of y by the usual formula.
Convolution with_out(Convolution c) {
  for (size_t i = 0; i < static_cast<size_t>(c.spatial); ++i) {
    c.out[i] = (c.in[i] + 2 * c.pad[i] - (c.kernel[i] - 1) * c.dilation[i] - 1) / c.stride[i] + 1;
  }
  return c;
}

TEST(Convolution, OneDimensionMatchesTheDefinition) {
  for (const int64_t stride : {1, 2}) {
    for (const int64_t pad : {0, 2}) {
      for (const int64_t dilation : {1, 3}) {
        check_both(with_out({.dtype = DType::kF32,
                             .spatial = 1,
                             .batch = 2,
                             .groups = 1,
                             .in_channels = 3,
                             .out_channels = 5,
                             .in = {13},
                             .out = {},
                             .kernel = {3},
                             .stride = {stride},
                             .pad = {pad},
                             .dilation = {dilation}}));
      }
    }
  }
}

TEST(Convolution, TwoDimensionsMatchTheDefinition) {
  for (const int64_t kernel : {1, 3}) {
    for (const int64_t stride : {1, 2}) {
      for (const int64_t pad : {0, 1}) {
        for (const int64_t dilation : {1, 2}) {
          for (const int64_t groups : {1, 2, 4}) {
            check_both(with_out({.dtype = DType::kF32,
                                 .spatial = 2,
                                 .batch = 3,
                                 .groups = groups,
                                 .in_channels = 4,
                                 .out_channels = 8,
                                 .in = {9, 8},
                                 .out = {},
                                 .kernel = {kernel, 3},
                                 .stride = {stride, 1},
                                 .pad = {pad, 1},
                                 .dilation = {dilation, 1}}));
          }
        }
      }
    }
  }
}

TEST(Convolution, ThreeDimensionsMatchTheDefinition) {
  for (const int64_t groups : {1, 3}) {
    check_both(with_out({.dtype = DType::kF32,
                         .spatial = 3,
                         .batch = 2,
                         .groups = groups,
                         .in_channels = 3,
                         .out_channels = 6,
                         .in = {5, 6, 7},
                         .out = {},
                         .kernel = {2, 3, 1},
                         .stride = {1, 2, 2},
                         .pad = {1, 0, 1},
                         .dilation = {2, 1, 1}}));
  }
}

TEST(Convolution, EveryLayoutChoiceInsideMatchesTheDefinition) {
  // Pointwise over many positions, few and many channels, depthwise, grouped.
  struct Shape {
    int64_t groups, in_channels, out_channels, size, kernel;
  };
  for (const Shape s : {Shape{1, 16, 24, 30, 1}, Shape{1, 1, 32, 10, 3}, Shape{1, 3, 16, 12, 5}, Shape{1, 32, 48, 7, 3},
                        Shape{1, 40, 16, 6, 1}, Shape{20, 20, 20, 9, 3}, Shape{16, 16, 32, 9, 3},
                        Shape{4, 16, 32, 9, 3}, Shape{1, 17, 19, 5, 2}}) {
    check_both(with_out({.dtype = DType::kF32,
                         .spatial = 2,
                         .batch = 2,
                         .groups = s.groups,
                         .in_channels = s.in_channels,
                         .out_channels = s.out_channels,
                         .in = {s.size, s.size},
                         .out = {},
                         .kernel = {s.kernel, s.kernel},
                         .stride = {1, 1},
                         .pad = {s.kernel / 2, s.kernel / 2},
                         .dilation = {1, 1}}));
  }
}

TEST(Convolution, SizesOfYBeyondTheUsualFormulaMatchTheDefinition) {
  // 7 with kernel 2 and stride 3 gives 2 by the formula and leaves elements unused; 3 needs padding behind alone (the
  // transposed convolution with output padding asks for such sizes).
  for (const int64_t out : {1, 2, 3}) {
    check_both({.dtype = DType::kF32,
                .spatial = 2,
                .batch = 2,
                .groups = 1,
                .in_channels = 3,
                .out_channels = 4,
                .in = {7, 7},
                .out = {out, 2},
                .kernel = {2, 2},
                .stride = {3, 3},
                .pad = {0, 0},
                .dilation = {1, 1}});
  }
}

TEST(Convolution, LargeEnoughForSeveralBlocksOfColumnsMatchesTheDefinition) {
  Convolution c = with_out({.dtype = DType::kF32,
                            .spatial = 2,
                            .batch = 2,
                            .groups = 1,
                            .in_channels = 24,
                            .out_channels = 3,
                            .in = {40, 31},
                            .out = {},
                            .kernel = {3, 3},
                            .stride = {1, 1},
                            .pad = {1, 1},
                            .dilation = {1, 1}});
  check<double>(c, kF64);
  c.channels_last = true;
  check<double>(c, kF64);
}

TEST(Convolution, AnyNumberOfThreadsMatchesTheDefinition) {
  const int before = thread_count();
  for (const int threads : {1, 2, 3}) {
    set_thread_count(threads);
    check_both(with_out({.dtype = DType::kF32,
                         .spatial = 2,
                         .batch = 5,
                         .groups = 1,
                         .in_channels = 16,
                         .out_channels = 32,
                         .in = {14, 14},
                         .out = {},
                         .kernel = {3, 3},
                         .stride = {1, 1},
                         .pad = {1, 1},
                         .dilation = {1, 1}}));
  }
  set_thread_count(before);
}

// Sevenths and thirteenths, whose sums are rounded.
template <class T>
void expect_same_convolution_bits(Convolution c) {
  c.dtype = dtype_of<T>;
  const auto rounded = [](int64_t count, int64_t seed) {
    std::vector<T> x(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = static_cast<T>(value(i + seed) / 7 + 1.0 / 13);
    return x;
  };
  const int64_t out = volume(c.out, c.spatial), in = volume(c.in, c.spatial);
  const std::vector<T> x = rounded(c.batch * c.in_channels * in, 0), dy = rounded(c.batch * c.out_channels * out, 5),
                       w = rounded(c.out_channels * c.in_channels / c.groups * volume(c.kernel, c.spatial), 3);
  std::vector<std::vector<T>> first;
  for (const int threads : {1, 2, 3, 4}) {
    set_thread_count(threads);
    std::vector<std::vector<T>> found{std::vector<T>(dy.size()), std::vector<T>(x.size()), std::vector<T>(w.size()),
                                      std::vector<T>(static_cast<size_t>(c.out_channels))};
    convolution_forward(c, x.data(), w.data(), nullptr, found[0].data());
    convolution_backward_data(c, dy.data(), w.data(), found[1].data());
    convolution_backward_weights(c, x.data(), dy.data(), found[2].data(), found[3].data());
    if (threads == 1) first = found;
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(std::memcmp(found[i].data(), first[i].data(), found[i].size() * sizeof(T)), 0)
          << threads << " threads, result " << i;
  }
}

TEST(Convolution, HasTheSameBitsForAnyNumberOfThreadsWhereThatIsWanted) {
  const int before = thread_count();
  set_same_bits(true);
  for (const int64_t batch : {2, 9}) {
    const Convolution c = with_out({.dtype = DType::kF32,
                                    .spatial = 2,
                                    .batch = batch,
                                    .groups = 1,
                                    .in_channels = 16,
                                    .out_channels = 32,
                                    .in = {14, 14},
                                    .out = {},
                                    .kernel = {3, 3},
                                    .stride = {1, 1},
                                    .pad = {1, 1},
                                    .dilation = {1, 1}});
    expect_same_convolution_bits<float>(c);
    expect_same_convolution_bits<double>(c);
  }
  set_same_bits(false);
  set_thread_count(before);
}

TEST(Convolution, RunsInsideAParallelRegion) {
  parallel_for(4, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      check<float>(with_out({.dtype = DType::kF32,
                             .spatial = 2,
                             .batch = 4,
                             .groups = 1,
                             .in_channels = 16,
                             .out_channels = 16,
                             .in = {8 + i, 8},
                             .out = {},
                             .kernel = {3, 3},
                             .stride = {1, 1},
                             .pad = {1, 1},
                             .dilation = {1, 1}}),
                   kF32);
    }
  });
}

TEST(Convolution, HalvesAccumulateInF32AndRoundOnce) {
  for (const bool channels_last : {false, true}) {
    for (const int64_t groups : {1, 4}) {
      Convolution c = with_out({.dtype = DType::kF32,
                                .spatial = 2,
                                .batch = 3,
                                .groups = groups,
                                .in_channels = 16,
                                .out_channels = 32,
                                .in = {9, 8},
                                .out = {},
                                .kernel = {3, 3},
                                .stride = {2, 1},
                                .pad = {1, 1},
                                .dilation = {1, 1}});
      c.channels_last = channels_last;
      check<bfloat16>(c, kBF16);
      check<float16>(c, kF16);
    }
  }
}

TEST(Convolution, SecondCallOfAShapeBuildsNothing) {
  const Convolution c = with_out({.dtype = DType::kF32,
                                  .spatial = 2,
                                  .batch = 2,
                                  .groups = 1,
                                  .in_channels = 5,
                                  .out_channels = 6,
                                  .in = {11, 12},
                                  .out = {},
                                  .kernel = {3, 3},
                                  .stride = {1, 1},
                                  .pad = {1, 1},
                                  .dilation = {1, 1}});
  check<float>(c, kF32);
  const dnnl::CacheCounts before = dnnl::cache_counts();
  check<float>(c, kF32);
  EXPECT_GT(dnnl::cache_counts().lookups, before.lookups);
  EXPECT_EQ(dnnl::cache_counts().built, before.built);
}

TEST(Convolution, EmptyBatchesAndOutputsGiveZeroGradients) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
    Convolution c = with_out({.dtype = dtype,
                              .spatial = 1,
                              .batch = 0,
                              .groups = 1,
                              .in_channels = 1,
                              .out_channels = 1,
                              .in = {4},
                              .out = {},
                              .kernel = {2},
                              .stride = {1},
                              .pad = {0},
                              .dilation = {1}});
    double dw[2] = {7, 7}, dbias = 7;
    convolution_forward(c, nullptr, nullptr, nullptr, nullptr);
    convolution_backward_data(c, nullptr, nullptr, nullptr);
    convolution_backward_weights(c, nullptr, nullptr, dw, &dbias);
    if (dtype == DType::kF64) {
      EXPECT_EQ(dw[0], 0);
      EXPECT_EQ(dw[1], 0);
      EXPECT_EQ(dbias, 0);
    }
  }
}

TEST(Convolution, OtherDtypesAreErrors) {
  Convolution c = with_out({.dtype = DType::kI32,
                            .spatial = 1,
                            .batch = 1,
                            .groups = 1,
                            .in_channels = 1,
                            .out_channels = 1,
                            .in = {4},
                            .out = {},
                            .kernel = {2},
                            .stride = {1},
                            .pad = {0},
                            .dilation = {1}});
  EXPECT_THROW(convolution_forward(c, nullptr, nullptr, nullptr, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace chorale::kernel::cpu
