// ZeRO among ranks that share a GPU.
#include <gtest/gtest.h>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/zero/zero_join_test_util.h"

namespace chorale::zero {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

class CudaZero : public testing::Test {
 protected:
  void SetUp() override {
    if (config::env("CHORALE_CUDA_REHEARSAL")) GTEST_SKIP() << "a rehearsal has no numbers to send";
    try {
      runtime_of(kGpu);
    } catch (const StateError& error) {
      GTEST_SKIP() << "no GPU: " << error.what();
    }
  }
};

// spec: test_zero_join_gpu
TEST_F(CudaZero, RanksMayHaveDifferentNumbersOfInputs) { expect_join_of_uneven_inputs(kGpu); }

}  // namespace
}  // namespace chorale::zero
