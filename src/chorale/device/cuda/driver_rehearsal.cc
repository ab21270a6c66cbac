// The stand-in for the driver (Note [Rehearsal]).
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "chorale/device/cuda/driver.h"

namespace chorale::cuda {
namespace {

template <class F>
struct Succeed;
template <class... A>
struct Succeed<CUresult (*)(A...)> {
  static CUresult call(A...) { return CUDA_SUCCESS; }
};

// Handles must differ from null; nobody looks behind them.
template <class T>
T next_handle() {
  static uintptr_t last = 0;
  return reinterpret_cast<T>(++last);
}

}  // namespace

Driver rehearsal_driver() {
  Driver d;
#define CHORALE_CUDA_SUCCEED(name) d.name = &Succeed<decltype(d.name)>::call;
  CHORALE_CUDA_DRIVER(CHORALE_CUDA_SUCCEED)
#undef CHORALE_CUDA_SUCCEED
  d.rehearsal = true;
  d.cuGetErrorString = [](CUresult, const char** text) {
    *text = "an error of the rehearsal";
    return CUDA_SUCCESS;
  };
  d.cuDeviceGetCount = [](int* count) {
    *count = kRehearsalDevices;
    return CUDA_SUCCESS;
  };
  d.cuDeviceGet = [](CUdevice* number, int index) {
    *number = index;
    return CUDA_SUCCESS;
  };
  d.cuDeviceGetUuid = [](CUuuid* uuid, CUdevice number) {
    *uuid = {};
    uuid->bytes[0] = static_cast<char>(number + 1);
    return CUDA_SUCCESS;
  };
  d.cuDeviceGetName = [](char* name, int bytes, CUdevice) {
    std::strncpy(name, "rehearsal", static_cast<size_t>(bytes));
    return CUDA_SUCCESS;
  };
  d.cuDeviceGetAttribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR               ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT                 ? 132
             : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR ? 228 * 1024
                                                                                     : 0;
    return CUDA_SUCCESS;
  };
  d.cuDeviceTotalMem = [](size_t* bytes, CUdevice) {
    *bytes = size_t{1} << 34;
    return CUDA_SUCCESS;
  };
  d.cuMemGetInfo = [](size_t* free, size_t* total) {
    *free = *total = size_t{1} << 34;
    return CUDA_SUCCESS;
  };
  d.cuMemGetAllocationGranularity = [](size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = size_t{1} << 21;
    return CUDA_SUCCESS;
  };
  d.cuMemAddressReserve = [](CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* const taken =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (taken == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(taken);
    return CUDA_SUCCESS;
  };
  d.cuMemHostAlloc = [](void** address, size_t bytes, unsigned) {
    *address = std::calloc(1, bytes);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  };
  d.cuMemcpyAsync = [](CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return CUDA_SUCCESS;
  };
  d.cuMemsetD8Async = [](CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    return CUDA_SUCCESS;
  };
  d.cuStreamCreateWithPriority = [](CUstream* stream, unsigned, int) {
    *stream = next_handle<CUstream>();
    return CUDA_SUCCESS;
  };
  d.cuEventCreate = [](CUevent* event, unsigned) {
    *event = next_handle<CUevent>();
    return CUDA_SUCCESS;
  };
  d.cuModuleGetFunction = [](CUfunction* function, CUmodule, const char*) {
    *function = next_handle<CUfunction>();
    return CUDA_SUCCESS;
  };
  d.cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  };
  return d;
}

}  // namespace chorale::cuda
