// ZeRO among ranks that share a GPU.
#include <gtest/gtest.h>

#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/zero/zero_join_test_util.h"

namespace chorale::zero {
namespace {

using cuda::kGpu;

class CudaZero : public cuda::GpuNumbersTest {};

// spec: test_zero_join_gpu
TEST_F(CudaZero, RanksMayHaveDifferentNumbersOfInputs) { expect_join_of_uneven_inputs(kGpu); }

}  // namespace
}  // namespace chorale::zero
