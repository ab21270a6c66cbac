// Every row on a GPU gives what the CPU gives, within rounding: forward and backward, in several dtypes and layouts.
// Rows that have no kernel there are listed, and the list is checked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <iostream>
#include <set>

#include "chorale/api/table_test_util.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/collective.h"
#include "chorale/op/convolution.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/joined.h"
#include "chorale/op/kernels.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/product.h"
#include "chorale/op/random.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using cuda::kGpu;
using cuda::rehearses;

// Rows without a kernel on GPUs. A commit that writes one takes its row off.
const std::set<std::string> kWithout = {
#include "chorale/api/cuda/rows_without_kernel.inc"
};

// Kernels are compiled and not run (Note [Rehearsal]): there is nothing to compare. Each text is compiled in f32, or
// ("all") in every dtype.
bool rehearses_f32() { return rehearses() && *config::env("CHORALE_CUDA_REHEARSAL") != "all"; }

class CudaTable : public cuda::GpuTest, public testing::WithParamInterface<const OpDef*> {
 protected:
  const OpDef& row() const { return *GetParam(); }
};

double tolerance_of(DType dtype, const Sample& sample) {
  if (dtype == DType::kF64) return 1e-9;
  if (dtype == DType::kF32) return std::max(2e-5, 2 * sample.f32_tolerance);
  return dtype == DType::kF16 ? 4e-3 : 4e-2;
}

void compare(const std::vector<Tensor>& found, const std::vector<Tensor>& expected, double tolerance,
             const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (!expected[i].defined() || expected[i].is_sparse()) continue;
    if (rehearses()) continue;
    expect_close(to(found[i], kCpu), expected[i], tolerance, concat(what, " result ", i));
  }
}

TEST_P(CudaTable, GivesWhatTheCpuGives) {
  if (!find_kernel(row(), DeviceType::kCuda)) {
    EXPECT_TRUE(kWithout.count(row().name)) << row().name << " has no kernel for cuda and is not on the list";
    return;
  }
  EXPECT_FALSE(kWithout.count(row().name)) << row().name << " has a kernel for cuda: take it off the list";
  if (rehearses() && communicates(row())) return;  // it would read which group is meant
  for (const Sample& sample : row().samples()) {
    if (!is_dense_sample(sample) || !sample.in[0].defined()) continue;
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      if (rehearses_f32() && dtype != DType::kF32) continue;
      const auto in = cast_inputs(sample.in, dtype);
      if (!row().dtypes.has(in[0].dtype())) continue;
      const std::string what = concat(describe(row(), sample), " in ", dtype);
      std::vector<Tensor> expected;
      try {
        expected = run(row(), in, sample.attrs);
      } catch (const Error&) {
        continue;  // an op that does not take a mixture which the cast made
      }
      compare(run(row(), on_device(in, kGpu), sample.attrs), expected, tolerance_of(dtype, sample), what);
      // What a view of given strides shows depends on how its input lies.
      if (dtype != DType::kF32 || row().view || std::string(row().name) == "as_strided_backward") continue;
      for (const Layout layout : {Layout::kEverySecond, Layout::kReversedDims}) {
        compare(run(row(), relayout(on_device(in, kGpu), layout), sample.attrs), expected, tolerance_of(dtype, sample),
                what);
      }
    }
  }
}

TEST_P(CudaTable, GradientsAreThoseOfTheCpu) {
  if (row().grad == &not_differentiable || !find_kernel(row(), DeviceType::kCuda) || rehearses_f32()) return;
  for (const Sample& sample : row().samples()) {
    if (!sample.grad || !is_dense_sample(sample)) continue;
    const std::string what = describe(row(), sample);
    const auto expected = gradients_on(kCpu, row(), sample);
    std::vector<Tensor> found;
    try {
      found = gradients_on(kGpu, row(), sample);
    } catch (const StateError& error) {
      const std::string text = error.what();
      if (text.find("has no kernel for cuda") == std::string::npos) throw;
      const std::string needed = text.substr(1, text.find(']') - 1);
      EXPECT_TRUE(kWithout.count(needed)) << text;
      std::cout << "the gradient of " << row().name << " needs " << needed << ", which has no kernel for cuda\n";
      return;
    }
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined()) << what;
      if (!found[i].defined() || found[i].is_sparse() || rehearses()) continue;
      expect_close(to(found[i], kCpu), expected[i], 1e-8, concat(what, " gradient ", i));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, CudaTable, ::testing::ValuesIn(all_ops().begin(), all_ops().end()),
                         [](const auto& named) { return std::string(named.param->name); });

class CudaTensors : public cuda::GpuTest {};

const std::set<std::string> kThroughHost = {
#include "chorale/eager/cuda/rows_through_host.inc"
};

TEST_F(CudaTensors, RowsWithoutAKernelAreListed) {
  std::string list;
  size_t count = 0, rows = 0;
  for (const OpDef* row : all_ops()) {
    ++rows;
    if (find_kernel(*row, DeviceType::kCuda)) continue;
    list += concat("    \"", row->name, "\",\n");
    ++count;
  }
  std::cout << rows - count - kThroughHost.size() << " of " << rows << " rows have a kernel for cuda; "
            << kThroughHost.size() << " go through the host:\n";
  for (const std::string& row : kThroughHost) std::cout << "    " << row << "\n";
  std::cout << "without either:\n" << list;
  EXPECT_EQ(count, kWithout.size());
}

TEST_F(CudaTensors, RandomNumbersHaveTheBitsOfTheCpu) {
  if (rehearses()) return;
  Generator a(5), b(5);
  EXPECT_EQ(uniform({1003}, -1, 3, DType::kF32, a, kGpu).to_vector<float>(),
            uniform({1003}, -1, 3, DType::kF32, b).to_vector<float>());
  EXPECT_EQ(randint(-5, 1000, {77}, DType::kI64, a, kGpu).to_vector<int64_t>(),
            randint(-5, 1000, {77}, DType::kI64, b).to_vector<int64_t>());
}

TEST_F(CudaTensors, CopiesCrossDevicesWithAnyStrides) {
  if (rehearses()) return;
  const Tensor x = arange(24, DType::kF32).view_as({2, 3, 4}, {12, 4, 1}, 0);
  const Tensor turned = x.view_as({4, 2, 3}, {1, 12, 4}, 0);
  const Tensor there = to(turned, kGpu);
  EXPECT_EQ(there.to_vector<float>(), turned.to_vector<float>());
  const Tensor every_second = full({2, 3, 8}, 7, DType::kF32, kGpu);
  const Tensor target = every_second.view_as({2, 3, 4}, {24, 8, 2}, 0);
  copy_(target, x);
  EXPECT_EQ(target.to_vector<float>(), x.to_vector<float>());
  EXPECT_EQ(sum(every_second).item<float>(), 276 + 7 * 24);
}

TEST_F(CudaTensors, AnIndexOutOfRangeSurfacesAtTheNextWaitAndNamesTheOp) {
  if (rehearses()) return;
  const Tensor table = to(Tensor::from({1.0f, 2.0f}, {2}), kGpu);
  const Tensor index = to(Tensor::from({int64_t{5}}, {1}), kGpu);
  const Tensor picked = gather(table, 0, index);
  try {
    (void)picked.to_vector<float>();
    FAIL() << "index 5 of 2 was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("[gather] 5 at position 0 is out of range: there are 2"));
  }
  EXPECT_EQ(table.to_vector<float>(), (std::vector<float>{1, 2}));
}

// Numbers in the order [N, H, W, C], seen as [N, C, H, W].
Tensor image(const Shape& sizes, int seed, DType dtype, Device device) {
  return permute(to(to(sample(sizes, seed), dtype), device), {0, 3, 1, 2});
}

// The row on inputs that `make` puts on a device: the GPU gives what the CPU gives, in the same order in memory.
void compare_on_both(const OpDef& row, const Attrs& attrs, double tolerance,
                     const std::function<std::vector<Tensor>(Device)>& make) {
  const std::vector<Tensor> in = make(kGpu), expected = run(row, make(kCpu), attrs), found = run(row, in, attrs);
  const std::string what = concat(row.name, " of ", in[0].dtype(), " ", in[0].sizes());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i].strides(), expected[i].strides()) << what;
  compare(found, expected, tolerance, what);
}

TEST_F(CudaTensors, ImagesMayHaveTheirChannelsLast) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (rehearses_f32() && dtype != DType::kF32) continue;
    const double tolerance = dtype == DType::kF32 ? 1e-4 : 6e-2;
    const auto here = [&](const Tensor& x, Device device) { return to(to(x, dtype), device); };
    // Kernels of 3 x 3 and of 1 x 1, with and without a bias, strides and groups; first layers have 3 channels, and are
    // folded.
    struct Case {
      int64_t in, out, kernel, stride, groups;
      bool bias;
    };
    for (const Case& c : {Case{16, 24, 3, 1, 1, false}, Case{16, 32, 1, 1, 1, true}, Case{32, 16, 3, 2, 1, false},
                          Case{3, 16, 3, 2, 1, true}, Case{3, 16, 7, 2, 1, false}, Case{32, 32, 3, 1, 4, false}}) {
      const int64_t pad = c.kernel / 2, H = 9, W = 8;
      const kernel::ConvolutionAttrs forward{{c.stride, c.stride}, {pad, pad}, {1, 1}, {}, c.groups};
      kernel::ConvolutionAttrs to_data = forward, to_weight = forward;
      to_data.result = {H, W};
      to_weight.result = {c.kernel, c.kernel};
      const int64_t h = (H + 2 * pad - c.kernel) / c.stride + 1, w = (W + 2 * pad - c.kernel) / c.stride + 1;
      const auto x = [&](Device device) { return image({4, H, W, c.in}, 1, dtype, device); };
      const auto dy = [&](Device device) { return image({4, h, w, c.out}, 2, dtype, device); };
      const auto weight = [&](Device device) {
        return here(sample({c.out, c.in / c.groups, c.kernel, c.kernel}, 3, -0.2, 0.2), device);
      };
      compare_on_both(kConvolution, forward, tolerance, [&](Device d) -> std::vector<Tensor> {
        return {x(d), weight(d), c.bias ? here(sample({c.out}, 4), d) : Tensor()};
      });
      compare_on_both(kConvolutionTranspose, to_data, tolerance, [&](Device d) -> std::vector<Tensor> {
        return {dy(d), weight(d)};
      });
      compare_on_both(kConvolutionWeight, to_weight, 2 * tolerance, [&](Device d) -> std::vector<Tensor> {
        return {x(d), dy(d)};
      });
    }
    // 5 channels do not fill a pack; 24 are no power of two; 1,200 are more than a block takes at once in f32.
    for (const int64_t channels : {5, 8, 24, 64, 1200}) {
      const DType compute = compute_of(dtype);
      const auto of_channel = [&](int seed, Device device) {
        return to(to(sample({channels}, seed, 0.5, 2), compute), device);
      };
      const auto x = [&](Device device) { return image({3, 7, 5, channels}, 5, dtype, device); };
      compare_on_both(kBatchNorm, kernel::BatchNormAttrs{1e-5}, tolerance, [&](Device d) -> std::vector<Tensor> {
        return {x(d), here(sample({channels}, 6), d), here(sample({channels}, 7), d)};
      });
      compare_on_both(kBatchNormBackward, kernel::BatchNormAttrs{1e-5}, tolerance,
                      [&](Device d) -> std::vector<Tensor> {
                        return {image({3, 7, 5, channels}, 8, dtype, d), x(d), of_channel(9, d), of_channel(10, d),
                                here(sample({channels}, 6), d)};
                      });
      for (const int64_t stride : {1, 2}) {
        const kernel::PoolAttrs window{{3, 3}, {stride, stride}, {1, 1}, {1, 1}};
        compare_on_both(kMaxPool, window, 0, [&](Device d) -> std::vector<Tensor> { return {x(d)}; });
        const auto picked = run(kMaxPool, {x(kCpu)}, window);
        const Shape sizes = picked[0].sizes();
        compare_on_both(kMaxPoolBackward, kernel::AreaAttrs{7, 5}, tolerance, [&](Device d) -> std::vector<Tensor> {
          const Tensor indices = permute(to(contiguous(permute(picked[1], {0, 2, 3, 1})), d), {0, 3, 1, 2});
          return {image({sizes[0], sizes[2], sizes[3], sizes[1]}, 11, dtype, d), indices};
        });
      }
      compare_on_both(kAdaptiveAvgPool, kernel::AreaAttrs{1, 1}, tolerance,
                      [&](Device d) -> std::vector<Tensor> { return {x(d)}; });
    }
  }
}

// Logits of many classes, their loss, and gradients: rows are padded on the GPU, and nothing else is different.
TEST_F(CudaTensors, RowsOfManyClassesArePadded) {
  const int64_t classes = 1030;
  const Tensor x = to(sample({3, 30, 24}, 1), DType::kBF16), weight = to(sample({classes, 24}, 2), DType::kBF16),
               bias = to(sample({classes}, 3), DType::kBF16), target = sample_ints({90}, 0, classes);
  for (const double smoothing : {0.0, 0.1}) {
    if (rehearses_f32()) continue;
    const auto train = [&](Device device) {
      std::vector<Tensor> all = {to(x, device), to(weight, device), to(bias, device)};
      for (Tensor& one : all) {
        one = detach(one);
        set_requires_grad(one);
      }
      const Tensor y = linear(all[0], all[1], all[2]);
      const Tensor loss = cross_entropy(flatten(y, 0, -2), to(target, device), {}, Reduction::kSum, -100, smoothing);
      backward(loss);
      return std::vector{detach(y), detach(loss), gradient(all[0]), gradient(all[1]), gradient(all[2])};
    };
    const std::vector<Tensor> found = train(kGpu);
    EXPECT_EQ(found[0].strides(), (Strides{30 * 1088, 1088, 1}));
    compare(found, train(kCpu), 4e-2, concat("padded rows, smoothing ", smoothing));
  }
}

// Rows as long as those of a model, wide and narrow dtypes together, and attention large enough for cuDNN.
TEST_F(CudaTensors, JoinedRowsGiveWhatTheCpuGives) {
  if (rehearses_f32()) return;
  for (const DType wide : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const int64_t n : {768, 100, 4096}) {
      const Shape sizes = {37, n}, one = {37, 1};
      const auto at = [&](int seed, DType dtype) { return to(sample(sizes, seed), dtype); };
      const Tensor weight = to(sample({n}, 5), DType::kF32), bias = to(sample({n}, 6), DType::kF32);
      const DType statistics = compute_of(wide);
      const std::vector<Tensor> forward = {at(1, wide), at(2, DType::kBF16), weight, bias};
      const std::vector<Tensor> back = {at(1, wide),
                                        at(2, DType::kBF16),
                                        at(3, wide),
                                        to(sample(one, 4), statistics),
                                        to(sample(one, 7, 0.5, 2), statistics),
                                        weight};
      const std::string what = concat(wide, " ", n);
      const kernel::LayerNormAttrs attrs{{n}, 1e-5};
      const kernel::LayerNormBackwardAttrs back_attrs{{n}, true, 1e-5};
      const double tolerance = 2e-2;  // the narrow results round
      compare(run(kAddLayerNorm, on_device(forward, kGpu), attrs), run(kAddLayerNorm, forward, attrs), tolerance, what);
      compare(run(kAddLayerNormBackward, on_device(back, kGpu), back_attrs),
              run(kAddLayerNormBackward, back, back_attrs), tolerance, concat(what, " backward"));
    }
  }
  if (rehearses()) return;
  const Shape x = {2, 512, 4, 64}, lse = {2, 4, 512};
  const auto turned = [&](int seed) { return permute(to(to(sample(x, seed), DType::kBF16), kGpu), {0, 2, 1, 3}); };
  const kernel::AttentionAttrs attrs{.scale = 0.125, .causal = true};
  const Tensor q = turned(1), k = turned(2), v = turned(3);
  const std::vector<Tensor> made = run(kAttention, {q, k, v, Tensor(), Tensor()}, attrs);
  const std::vector<Tensor> in = {turned(4), Tensor(), q, k, v, Tensor(), made[0], made[1], Tensor()};
  const std::vector<Tensor> apart = run(kAttentionBackward, in, attrs), all = run(kAttentionBackwardJoined, in, attrs);
  for (int64_t i = 0; i < 3; ++i) {
    const Tensor part = permute(select(all[0], 2, i), {0, 2, 1, 3});
    expect_close(to(part, kCpu), to(apart[static_cast<size_t>(i)], kCpu), 2e-2, concat("gradient ", i));
  }
}

// A norm, the sum and the ReLU behind it, and their gradients: as the rows do it one after the other.
TEST_F(CudaTensors, JoinedBatchNormsHaveTheBitsOfTheRowsOneByOne) {
  const kernel::BatchNormAttrs attrs{1e-5};
  const OpDef& relu_backward = *find_op("relu_backward");
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    if (rehearses_f32() && dtype != DType::kF32) continue;
    for (const int64_t channels : {64, 24, 5, 1200}) {  // 5 do not fill a pack: they are turned first
      const auto of = [&](int seed) { return image({3, 13, 11, channels}, seed, dtype, kGpu); };
      const auto vector = [&](int seed) { return to(to(sample({channels}, seed), DType::kF32), kGpu); };
      const Tensor x = of(1), weight = vector(2), bias = vector(3), other = of(4), dy = of(5), more = of(6);
      const auto norm = run(kBatchNorm, {x, weight, bias}, attrs);
      for (const Tensor& added : {Tensor(), other}) {
        const std::string what = concat(dtype, " ", channels, added.defined() ? " with a sum" : "");
        const Tensor y = relu(added.defined() ? add(norm[0], added) : norm[0]);
        const auto joined = run(kBatchNormRelu, {x, added, weight, bias}, attrs);
        const auto same = [&](const Tensor& a, const Tensor& b, const char* name) {
          if (rehearses()) return;
          EXPECT_EQ(a.strides(), b.strides()) << what << name;
          expect_close(to(a, kCpu), to(b, kCpu), 0, concat(what, name));
        };
        same(joined[0], y, " y");
        same(joined[1], norm[1], " mean");
        same(joined[2], norm[2], " variance");
        const Tensor slope = added.defined() ? add(dy, more) : dy, through = run(relu_backward, {slope, y}, {})[0];
        const auto apart = run(kBatchNormBackward, {through, x, norm[1], norm[2], weight}, attrs);
        const auto sums =
            run(kReluBatchNormBackward, {dy, added.defined() ? more : Tensor(), y, x, norm[1], norm[2], weight}, attrs);
        same(sums[0], through, " through");
        for (size_t i = 0; i < 3; ++i) same(sums[i + 1], apart[i], " gradient");
        if (added.defined()) continue;
        const auto again = run(kBatchNormReluBackward, {dy, x, norm[1], norm[2], weight, bias}, attrs);
        for (size_t i = 0; i < 3; ++i) same(again[i], apart[i], " gradient without y");
      }
    }
  }
}

// Sums of columns that are made where their operand is: as the rows do it one after the other.
TEST_F(CudaTensors, SummedGradientsHaveTheBitsOfTheRowsOneByOne) {
  const OpDef& sum_row = *find_op("sum");
  const auto sums_of = [&](const Tensor& x, int64_t columns) {
    return run(sum_row, {view(x, {-1, columns})}, kernel::ReduceAttrs{IntList{0}, false})[0];
  };
  const auto same = [&](const std::vector<Tensor>& found, const std::vector<Tensor>& expected,
                        const std::string& what) {
    if (rehearses()) return;
    for (size_t i = 0; i < found.size(); ++i)
      expect_close(to(found[i], kCpu), to(expected[i], kCpu), 0, concat(what, " result ", i));
  };
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    if (rehearses_f32() && dtype != DType::kF32) continue;
    for (const Shape& sizes : {Shape{9000, 264}, Shape{3, 70, 1024}, Shape{37, 100}, Shape{130, 33}}) {
      const std::string what = concat(dtype, " ", sizes);
      const auto at = [&](int seed, DType type) { return to(to(sample(sizes, seed), type), kGpu); };
      for (const auto& [apart, summed] : {std::pair{find_op("gelu_erf_backward"), &kGeluErfBackwardSummed},
                                          std::pair{find_op("gelu_tanh_backward"), &kGeluTanhBackwardSummed}}) {
        const std::vector<Tensor> in = {at(1, dtype), at(2, dtype)};
        const Tensor dx = run(*apart, in, {})[0];
        same(run(*summed, in, {}), {dx, sums_of(dx, sizes.back())}, concat(what, " ", summed->name));
      }
      if (dtype == DType::kF16) continue;
      Shape one = sizes;
      one.back() = 1;
      const auto vector = [&](const Shape& shape, int seed) {
        return to(to(sample(shape, seed, 0.5, 2), compute_of(dtype)), kGpu);
      };
      const std::vector<Tensor> in = {at(1, dtype),   at(2, DType::kBF16), at(3, dtype),
                                      vector(one, 4), vector(one, 5),      vector({sizes.back()}, 6)};
      const kernel::LayerNormBackwardAttrs attrs{{sizes.back()}, true, 1e-5};
      std::vector<Tensor> expected = run(kAddLayerNormBackward, in, attrs);
      expected.push_back(sums_of(expected[1], sizes.back()));
      same(run(kAddLayerNormBackwardSummed, in, attrs), expected, concat(what, " norm"));
    }
  }
}

// Rows as long as those of models, also with places between them; the gradient may go over the logits.
TEST_F(CudaTensors, ALossWithItsSlopesHasTheBitsOfTheRowsOneByOne) {
  const OpDef &loss = *find_op("cross_entropy"), &backward = *find_op("cross_entropy_backward");
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    if (rehearses_f32() && dtype != DType::kF32) continue;
    for (const auto& [rows, classes, row] : {std::array<int64_t, 3>{700, 3000, 3000}, {40, 30522, 30528}, {3, 7, 7}}) {
      const Tensor whole = to(to(sample({rows, row}, 1), dtype), kGpu);
      std::vector<int64_t> targets;
      for (int64_t i = 0; i < rows; ++i) targets.push_back(i % 5 == 2 ? -100 : i * 37 % classes);
      const Tensor x = narrow(whole, 1, 0, classes), target = to(Tensor::from(targets, {rows}), kGpu);
      for (const Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kNone}) {
        const kernel::CrossEntropyAttrs attrs{.reduction = reduction};
        const auto apart = run(loss, {x, target, Tensor()}, attrs);
        for (const bool has_seed : {true, false}) {
          const Tensor seed = has_seed ? to(to(sample(apart[0].sizes(), 2), apart[0].dtype()), kGpu)
                                       : full(apart[0].sizes(), 1, apart[0].dtype(), kGpu);
          const Tensor dx = run(backward, {seed, x, target, Tensor(), apart[1]}, attrs)[0];
          const auto both = run(kCrossEntropyWithSlopes, {has_seed ? seed : Tensor(), x, target, Tensor()}, attrs);
          if (rehearses()) continue;
          const std::string what = concat(dtype, " ", rows, " x ", classes, " ", static_cast<int>(reduction), has_seed);
          expect_close(to(both[0], kCpu), to(apart[0], kCpu), 0, concat(what, " loss"));
          expect_close(to(both[1], kCpu), to(apart[1], kCpu), 0, concat(what, " logsumexp"));
          expect_close(to(both[2], kCpu), to(dx, kCpu), 0, concat(what, " gradient"));
        }
      }
    }
  }
}

// The sizes lie on both sides of the one below which a kernel of our own multiplies, and of the one above which
// cuBLASLt's algorithms are timed; a thread or a warp makes a sum; and operands lie in any order.
TEST_F(CudaTensors, ProductsOfAllSizesGiveWhatTheCpuGives) {
  struct Sizes {
    int64_t m, n, k;
  };
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    if (rehearses_f32() && dtype != DType::kF32) continue;
    const double tolerance = dtype == DType::kF64 ? 1e-9 : dtype == DType::kF32 ? 1e-4 : 6e-2;
    for (const Sizes& s : {Sizes{8, 20, 32}, Sizes{3, 7, 127}, Sizes{5, 9, 300}, Sizes{33, 70, 65}, Sizes{130, 67, 71},
                           Sizes{129, 1, 1000}, Sizes{65, 34, 601}, Sizes{264, 256, 512}}) {
      for (const int turned : {0, 1, 2, 3}) {
        const auto matrix = [&](int64_t rows, int64_t columns, int seed, bool turn) {
          const Tensor x = to(sample(turn ? Shape{columns, rows} : Shape{rows, columns}, seed), dtype);
          return [=](Device device) { return turn ? permute(to(x, device), {1, 0}) : to(x, device); };
        };
        const auto a = matrix(s.m, s.k, 1, (turned & 1) != 0), b = matrix(s.k, s.n, 2, (turned & 2) != 0);
        const Tensor bias = to(sample({s.n}, 3), dtype), c = to(sample({s.m, s.n}, 4), dtype);
        const auto all = [&](Device device) {
          const Tensor x = a(device), y = b(device), addend = to(bias, device), whole = to(c, device);
          const Tensor pair = matmul(stack({x, x + 1}), y);  // a batch
          return std::vector{matmul(x, y), addmm(addend, x, y), addmm(whole, x, y, 0.5, 2.0),
                             linear(x, permute(y, {1, 0}), addend), pair};
        };
        compare(all(kGpu), all(kCpu), tolerance, concat(dtype, " ", s.m, " x ", s.k, " by ", s.n, " turned ", turned));
      }
    }
  }
}

TEST_F(CudaTensors, MemoryIsReusedInTheOrderOfStreams) {
  if (rehearses()) return;
  Allocator& allocator = runtime_of(kGpu).allocator(kGpu);
  allocator.reset_peak();
  const size_t before = allocator.stats().current_bytes;
  Tensor x = full({1 << 20}, 1, DType::kF32, kGpu);
  for (int i = 0; i < 50; ++i) x = x + 1;
  EXPECT_EQ(sum(x).item<float>(), 51.0f * (1 << 20));
  // The old value, the new one, and small change.
  EXPECT_LE(allocator.stats().peak_bytes - before, size_t{3} * (size_t{4} << 20));
}

TEST_F(CudaTensors, TheErrorForTooMuchMemorySaysWhatWasAskedFor) {
  if (rehearses()) return;
  try {
    (void)Tensor::empty({int64_t{1} << 40}, DType::kF32, kGpu);
    FAIL() << "4 TiB were given";
  } catch (const StateError& error) {
    EXPECT_THAT(error.what(), ::testing::ContainsRegex("4194[0-9]+ MiB more were asked for"));
  }
  EXPECT_EQ(sum(full({3}, 2, DType::kF32, kGpu)).item<float>(), 6);
}

}  // namespace
}  // namespace chorale::op
