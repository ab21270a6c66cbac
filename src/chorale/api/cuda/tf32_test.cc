// Products of f32 with fewer digits, where they are asked for.
#include "chorale/base/tf32.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/op/samples.h"

namespace chorale {
namespace {

using cuda::kGpu;

class CudaTf32 : public cuda::GpuNumbersTest {};

// Products and convolutions with and without, beside f64 ones: an option that is off.
TEST_F(CudaTf32, RoundsOperandsWhereItIsAskedFor) {
  const auto numbers = [](const Shape& sizes, int seed) { return to(op::sample(sizes, seed, -1, 1), DType::kF32); };
  const Tensor a = numbers({256, 512}, 1), b = numbers({512, 128}, 2), x = numbers({4, 32, 16, 16}, 3),
               w = numbers({32, 32, 3, 3}, 4);
  const auto error = [](const Tensor& found, const Tensor& exact) {
    const Tensor apart = sub(to(to(found, kCpu), DType::kF64), exact);
    return std::sqrt(sum(square(apart)).item<double>() / sum(square(exact)).item<double>());
  };
  const auto wide = [](const Tensor& t) { return to(t, DType::kF64); };
  const auto here = [](const Tensor& t) { return to(t, kGpu); };
  const Tensor product = matmul(wide(a), wide(b)), image = conv2d(wide(x), wide(w));
  EXPECT_FALSE(tf32());
  EXPECT_LT(error(matmul(here(a), here(b)), product), 2e-6);
  EXPECT_LT(error(conv2d(here(x), here(w)), image), 2e-6);
  set_tf32(true);
  const double rounded = error(matmul(here(a), here(b)), product), of_image = error(conv2d(here(x), here(w)), image);
  set_tf32(false);
  EXPECT_GT(rounded, 2e-5);
  EXPECT_LT(rounded, 1e-3);
  EXPECT_LT(of_image, 1e-3);
  EXPECT_LT(error(matmul(here(a), here(b)), product), 2e-6);
}

}  // namespace
}  // namespace chorale
