// NVIDIA's driver, opened when it is first needed: one program starts on machines with and without it.
//
// Note [Rehearsal]
// Where CHORALE_CUDA_REHEARSAL is set, a stand-in takes the driver's place: memory is the host's, copies happen at
// once, kernels are compiled for sm_90 but not run. So a machine without a GPU can check that every kernel compiles and
// every launch is well formed, and can fill the cache of compiled kernels for a machine that has one. It has three
// devices, between which a stand-in for NCCL moves bytes (nccl_stand_in_test_util.h).
#pragma once

#include <cuda.h>

#include <string>

namespace chorale::cuda {

// The formatter moves such a list to the right each time.
// clang-format off
#define CHORALE_CUDA_DRIVER(X) \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorString) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) \
  X(cuDeviceGetAttribute) X(cuDeviceGetUuid) X(cuDeviceTotalMem) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) \
  X(cuStreamCreateWithPriority) X(cuStreamWaitEvent) X(cuStreamBeginCapture) X(cuStreamEndCapture) \
  X(cuStreamIsCapturing) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) \
  X(cuEventSynchronize) X(cuEventElapsedTime) X(cuMemGetInfo) X(cuMemAddressReserve) X(cuMemCreate) X(cuMemMap) \
  X(cuMemSetAccess) X(cuMemGetAllocationGranularity) X(cuMemHostAlloc) X(cuMemcpyAsync) X(cuMemsetD8Async) \
  X(cuMemAlloc) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuModuleLoadData) X(cuModuleGetFunction) \
  X(cuFuncSetAttribute) X(cuLaunchKernel) X(cuGraphDestroy) \
  X(cuGraphInstantiateWithFlags) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphGetNodes) X(cuGraphNodeGetType) \
  X(cuGraphMemsetNodeGetParams) X(cuGraphNodeGetDependencies) X(cuGraphNodeGetDependentNodes) \
  X(cuGraphAddKernelNode) X(cuGraphAddDependencies) X(cuGraphDestroyNode)
// clang-format on

// The functions by their names; cuda.h turns some of them into names with a version.
struct Driver {
#define CHORALE_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  CHORALE_CUDA_DRIVER(CHORALE_CUDA_MEMBER)
#undef CHORALE_CUDA_MEMBER
  bool rehearsal = false;
};

// Opened and initialised at the first call. Throws StateError, saying what to install, where there is none.
const Driver& driver();
// A driver whose functions do nothing or use the host's memory (Note [Rehearsal]).
Driver rehearsal_driver();
inline constexpr int kRehearsalDevices = 3;

// Throws StateError: what was tried, on behalf of which op, and what the driver said.
[[noreturn]] void raise(CUresult result, const char* tried);
inline void check(CUresult result, const char* tried) {
  if (result != CUDA_SUCCESS) [[unlikely]]
    raise(result, tried);
}

// The op whose kernel this thread is launching, for errors.
class OpScope {
 public:
  explicit OpScope(const char* op) : before_(current()) { current() = op; }
  ~OpScope() { current() = before_; }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;
  // Null outside of ops.
  static const char*& current();

 private:
  const char* before_;
};

}  // namespace chorale::cuda
