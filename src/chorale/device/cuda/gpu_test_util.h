// What tests on a GPU share; they are skipped where there is none.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/device/runtime.h"

namespace chorale::cuda {

inline constexpr Device kGpu{DeviceType::kCuda, 0};

// Whether kernels are compiled and not run (Note [Rehearsal] in driver.h).
inline bool rehearses() { return config::env("CHORALE_CUDA_REHEARSAL").has_value(); }

// Empty where there is a GPU.
inline std::string why_no_gpu() {
  try {
    runtime_of(kGpu);
    return {};
  } catch (const StateError& error) {
    return concat("no GPU: ", error.what());
  }
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

// The base of tests that look at the numbers that kernels make.
class GpuNumbersTest : public testing::Test {
 protected:
  void SetUp() override {
    if (rehearses()) GTEST_SKIP() << "a rehearsal has no numbers";
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

}  // namespace chorale::cuda
