// What a call of an op costs the host on a GPU, beside the launch of a kernel that does nothing. It runs on demand: it
// measures, and judges nothing.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>

#include "chorale/api/api.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/stream.h"

namespace chorale {
namespace {

using cuda::kGpu;

class CudaLaunches : public cuda::GpuNumbersTest {};

// Microseconds of the host for a call, the least of twenty stretches that are shorter than what the driver queues.
template <class Call>
double host_us(const Call& call) {
  constexpr int kStretches = 20, kCalls = 400;
  double least = 0;
  for (int i = 0; i < kStretches; ++i) {
    synchronize(kGpu);
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < kCalls; ++k) call();
    const double took =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / kCalls;
    least = i == 0 ? took : std::min(least, took);
  }
  synchronize(kGpu);
  return least;
}

// The driver's own call, with a kernel that does nothing, on this thread's stream. Ops of this thread have made the
// device's context its own.
std::function<void()> empty_launch() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  CUmodule module = nullptr;
  CUfunction nothing = nullptr;
  const char* const text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n";
  EXPECT_EQ(reinterpret_cast<decltype(&cuModuleLoadData)>(dlsym(driver, "cuModuleLoadData"))(&module, text),
            CUDA_SUCCESS);
  EXPECT_EQ(reinterpret_cast<decltype(&cuModuleGetFunction)>(dlsym(driver, "cuModuleGetFunction"))(&nothing, module,
                                                                                                   "nothing"),
            CUDA_SUCCESS);
  const auto launch = reinterpret_cast<decltype(&cuLaunchKernel)>(dlsym(driver, "cuLaunchKernel"));
  const auto stream = static_cast<CUstream>(current_stream(kGpu).handle);
  return [=] { EXPECT_EQ(launch(nothing, 1, 1, 1, 32, 1, 1, 0, stream, nullptr, nullptr), CUDA_SUCCESS); };
}

TEST_F(CudaLaunches, DISABLED_HowMuchACallCosts) {
  const Tensor a = ones({8, 8}, DType::kF32, kGpu), b = ones({8, 8}, DType::kF32, kGpu);
  const Tensor out = add(a, b);
  const double empty = host_us(empty_launch());
  const Tensor wanted = ones({8, 8}, DType::kF32, kGpu);
  set_requires_grad(wanted);
  double plain = 0, in_place = 0, product = 0;
  {
    const NoGrad quiet;
    plain = host_us([&] { (void)add(a, b); });
    in_place = host_us([&] { add_(out, b); });
    product = host_us([&] { (void)matmul(a, b); });
  }
  const double recorded = host_us([&] { (void)add(wanted, b); });
  std::cout << "figure: the host for a call, us: an empty launch " << empty << ", add " << plain << ", in place "
            << in_place << ", recorded for backward " << recorded << ", matmul of 8 x 8 " << product << std::endl;
}

}  // namespace
}  // namespace chorale
