// Every row on the simulated device gives the bits of the CPU, forward and backward: memory that the host cannot touch,
// streams that run late.
#include <gtest/gtest.h>

#include <cstring>

#include "chorale/api/table_test_util.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/random.h"
#include "chorale/op/reduce.h"

namespace chorale::op {
namespace {

constexpr Device kSim{DeviceType::kSim, 0};

class SimTable : public ::testing::TestWithParam<const OpDef*> {
 protected:
  void SetUp() override {
    eager::add_sim_device({.most_delay = std::chrono::microseconds(20)});
    threads_ = thread_count();
    set_thread_count(1);  // as kernels of the device do: sums are cut by the number of threads
  }
  void TearDown() override { set_thread_count(threads_); }
  const OpDef& row() const { return *GetParam(); }

 private:
  int threads_ = 1;
};

void expect_same_bits(const Tensor& found, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  ASSERT_EQ(found.dtype(), expected.dtype()) << what;
  if (found.elems() == 0) return;  // there may be no memory to look at
  const Tensor a = contiguous(found), b = contiguous(expected);
  EXPECT_EQ(std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.elems()) * a.elem_bytes()), 0) << what;
}

TEST_P(SimTable, GivesTheBitsOfTheCpu) {
  for (const Sample& sample : row().samples()) {
    if (!is_dense_sample(sample) || !sample.in[0].defined()) continue;
    for (DType dtype : {DType::kF64, DType::kF32}) {
      const auto in = cast_inputs(sample.in, dtype);
      if (!row().dtypes.has(in[0].dtype())) continue;
      const auto expected = run(row(), in, sample.attrs);
      const auto found = run(row(), on_device(in, kSim), sample.attrs);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        if (!expected[i].defined() || expected[i].is_sparse()) continue;
        EXPECT_EQ(found[i].device(), &row() == &kToDevice ? kCpu : kSim) << describe(row(), sample);
        expect_same_bits(to(found[i], kCpu), expected[i], describe(row(), sample));
      }
    }
  }
}

TEST_P(SimTable, GradientsHaveTheBitsOfTheCpu) {
  if (row().grad == &not_differentiable) return;
  for (const Sample& sample : row().samples()) {
    if (!sample.grad || !is_dense_sample(sample)) continue;
    const auto expected = gradients_on(kCpu, row(), sample), found = gradients_on(kSim, row(), sample);
    ASSERT_EQ(found.size(), expected.size()) << describe(row(), sample);
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined()) << describe(row(), sample);
      if (!found[i].defined()) continue;
      EXPECT_EQ(found[i].device(), kSim) << describe(row(), sample);
      expect_same_bits(to(found[i], kCpu), expected[i], describe(row(), sample));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, SimTable, ::testing::ValuesIn(all_ops().begin(), all_ops().end()),
                         [](const auto& named) { return std::string(named.param->name); });

TEST(SimTensors, CreationAndRandomFunctionsTakeTheDevice) {
  eager::add_sim_device();
  const auto made = [](Device device) {
    Generator g(5);
    const Tensor weights = Tensor::from({1.0, 0.0, 2.0, 0.5}, {4}, device), x = empty({2, 3}, DType::kF64, device);
    const std::vector<Tensor> all{
        full({2, 2}, 3, DType::kF32, device),
        zeros({3}, DType::kI64, device),
        ones({3}, DType::kBool, device),
        arange(4, DType::kI64, device),
        arange(1, 7, 2, DType::kF64, device),
        linspace(0, 1, 5, DType::kF32, device),
        eye(3, 2, DType::kF32, device),
        uniform({33}, -1, 2, DType::kF32, g, device),
        normal({33}, 0, 1, DType::kF32, g, device),
        randint(-3, 9, {7}, DType::kI64, g, device),
        randperm(11, DType::kI64, g, device),
        bernoulli(full({9}, 0.5, DType::kF64, device), g),
        multinomial(weights, 3, true, g),
        fill_(x, 2),
        full_like(x, 7),
        zeros_like(x),
        ones_like(x),
        uniform_(empty_like(x), 0, 1, g),
        normal_(empty_like(x), 0, 1, g),
        Tensor::scalar(3, DType::kF16, device),
        draw(g, 4, device),
    };
    std::vector<std::vector<double>> values;
    for (const Tensor& one : all) {
      EXPECT_EQ(one.device(), device) << values.size();
      values.push_back(device == kNull ? std::vector<double>{} : one.to_vector<double>());
    }
    return std::pair(values, g.take(0).offset);
  };
  const auto expected = made(kCpu);
  EXPECT_EQ(made(kSim), expected);
  EXPECT_EQ(made(kNull).second, expected.second) << "random numbers go on";
  EXPECT_EQ(sum(full({3}, 2, DType::kF64, {DeviceType::kSim, 1})).item<double>(), 6);
}

TEST(SimTensors, DevicesDoNotMixAndCopiesCrossThem) {
  eager::add_sim_device();
  constexpr Device other{DeviceType::kSim, 1};
  const Tensor x = Tensor::from({1.0f, 2.0f, 3.0f}, {3});
  EXPECT_THROW(add(x, to(x, kSim)), InvalidArgument);
  EXPECT_EQ(to(to(to(x, kSim), other), kCpu).to_vector<float>(), x.to_vector<float>());
  const Tensor there = zeros({3}, DType::kF64, other);
  copy_(there, x);
  EXPECT_EQ(there.to_vector<double>(), (std::vector<double>{1, 2, 3}));
  EXPECT_THROW((void)there.data<double>(), StateError);
}

TEST(SimTensors, AKernelsErrorSurfacesAtTheNextWait) {
  eager::add_sim_device();
  const Tensor table = to(Tensor::from({1.0f, 2.0f}, {2}), kSim);
  const Tensor index = to(Tensor::from({int64_t{5}}, {1}), kSim);
  Tensor picked;
  EXPECT_NO_THROW(picked = gather(table, 0, index));
  EXPECT_THROW((void)picked.to_vector<float>(), Error);
  EXPECT_EQ(table.to_vector<float>(), (std::vector<float>{1, 2}));
}

}  // namespace
}  // namespace chorale::op
