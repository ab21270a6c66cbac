// Every row on a GPU gives what the CPU gives, within rounding: forward and backward, in several dtypes and layouts.
// Rows that have no kernel there are listed, and the list is checked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <set>

#include "chorale/api/table_test_util.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/kernels.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/random.h"
#include "chorale/op/reduce.h"

namespace chorale::op {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

// Rows without a kernel on GPUs. A commit that writes one takes its row off.
const std::set<std::string> kWithout = {
#include "chorale/api/cuda/rows_without_kernel.inc"
};

// Kernels are compiled and not run (Note [Rehearsal]): there is nothing to compare. Each text is compiled in f32, or
// ("all") in every dtype.
bool rehearses() { return config::env("CHORALE_CUDA_REHEARSAL").has_value(); }
bool rehearses_f32() { return rehearses() && *config::env("CHORALE_CUDA_REHEARSAL") != "all"; }

class CudaTable : public ::testing::TestWithParam<const OpDef*> {
 protected:
  void SetUp() override {
    try {
      runtime_of(kGpu);
    } catch (const StateError& error) {
      GTEST_SKIP() << "no GPU: " << error.what();
    }
  }
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

class CudaTensors : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      runtime_of(kGpu);
    } catch (const StateError& error) {
      GTEST_SKIP() << "no GPU: " << error.what();
    }
  }
};

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
