// Which calls of NVIDIA's driver wait while a stream waits for the host (cuStreamWaitValue32)? Each is made by a thread
// of its own while a stream is held; 200 ms later another thread tries a copy; 200 ms later the host lets the stream
// go.
//
//   g++ -std=c++20 -O1 gpu_held_stream.cc -o held -I/usr/local/cuda/include -lcuda -L/usr/local/cuda/lib64 -lnvrtc
#include <cuda.h>
#include <nvrtc.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

void check(CUresult result, const char* tried) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  std::printf("%s: %s\n", tried, name);
  std::exit(1);
}
#define CHECK(call) check(call, #call)

std::string binary_of(const std::string& name) {
  const std::string text = "extern \"C\" __global__ void " + name + "(int* x) { x[threadIdx.x] += 1; }";
  nvrtcProgram program = nullptr;
  nvrtcCreateProgram(&program, text.c_str(), "k.cu", 0, nullptr, nullptr);
  const char* const options[] = {"--gpu-architecture=sm_90"};
  nvrtcCompileProgram(program, 1, options);
  size_t bytes = 0;
  nvrtcGetCUBINSize(program, &bytes);
  std::string binary(bytes, 0);
  nvrtcGetCUBIN(program, binary.data());
  return binary;
}

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main() {
  CUdevice device = 0;
  CUcontext context = nullptr;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CUstream held = nullptr, other = nullptr, made = nullptr;
  CHECK(cuStreamCreate(&held, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  void *flag_memory = nullptr, *pinned = nullptr, *more = nullptr;
  CHECK(cuMemHostAlloc(&flag_memory, 4096, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
  auto* const flag = static_cast<volatile uint32_t*>(flag_memory);
  CUdeviceptr flag_there = 0, x = 0, taken = 0, pooled = 0, room = 0;
  CHECK(cuMemHostGetDevicePointer(&flag_there, flag_memory, 0));
  constexpr size_t kBytes = 1 << 20, kStep = 2 << 20;
  CHECK(cuMemAlloc(&x, kBytes));
  CHECK(cuMemHostAlloc(&pinned, kBytes, 0));
  CHECK(cuMemAddressReserve(&room, 64 << 20, 0, 0, 0));
  std::vector<char> ordinary(kBytes);
  const std::string binaries[] = {binary_of("k0"), binary_of("k1"), binary_of("k2")};
  CUmodule modules[3] = {};
  CUfunction kernels[3] = {};
  CHECK(cuModuleLoadData(&modules[0], binaries[0].data()));
  CHECK(cuModuleGetFunction(&kernels[0], modules[0], "k0"));
  CHECK(cuModuleLoadData(&modules[2], binaries[2].data()));
  void* arguments[] = {&x};
  const auto launch = [&](int kernel, CUstream stream) {
    CHECK(cuLaunchKernel(kernels[kernel], 1, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr));
  };
  launch(0, other);
  CHECK(cuStreamSynchronize(other));
  CUmemAllocationProp property{};
  property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  property.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handle = 0;
  CUevent event = nullptr;
  CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));

  struct Call {
    const char* name;
    std::function<void()> run;
  };
  const std::vector<Call> calls = {
      {"launch of a loaded kernel, other stream", [&] { launch(0, other); }},
      {"launch of a loaded kernel, held stream", [&] { launch(0, held); }},
      {"cuStreamSynchronize of the other stream", [&] { CHECK(cuStreamSynchronize(other)); }},
      {"copy from pinned memory", [&] { CHECK(cuMemcpyHtoDAsync(x, pinned, kBytes, other)); }},
      {"copy from ordinary memory", [&] { CHECK(cuMemcpyHtoDAsync(x, ordinary.data(), kBytes, other)); }},
      {"copy to ordinary memory", [&] { CHECK(cuMemcpyDtoHAsync(ordinary.data(), x, kBytes, other)); }},
      {"cuEventRecord on the held stream", [&] { CHECK(cuEventRecord(event, held)); }},
      {"cuStreamCreate", [&] { CHECK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING)); }},
      {"cuMemHostAlloc", [&] { CHECK(cuMemHostAlloc(&more, kBytes, 0)); }},
      {"cuMemAlloc", [&] { CHECK(cuMemAlloc(&taken, 8 << 20)); }},
      {"cuMemFree", [&] { CHECK(cuMemFree(taken)); }},
      {"cuMemAllocAsync", [&] { CHECK(cuMemAllocAsync(&pooled, 8 << 20, other)); }},
      {"cuMemCreate", [&] { CHECK(cuMemCreate(&handle, kStep, &property, 0)); }},
      {"cuMemMap", [&] { CHECK(cuMemMap(room, kStep, 0, handle, 0)); }},
      {"cuMemSetAccess", [&] { CHECK(cuMemSetAccess(room, kStep, &access, 1)); }},
      {"cuMemUnmap", [&] { CHECK(cuMemUnmap(room, kStep)); }},
      {"cuModuleGetFunction of a loaded module", [&] { CHECK(cuModuleGetFunction(&kernels[2], modules[2], "k2")); }},
      {"first launch from it", [&] { launch(2, other); }},
      {"cuModuleLoadData", [&] { CHECK(cuModuleLoadData(&modules[1], binaries[1].data())); }},
      {"cuModuleGetFunction of it", [&] { CHECK(cuModuleGetFunction(&kernels[1], modules[1], "k1")); }},
      {"first launch of it", [&] { launch(1, other); }},
  };
  uint32_t number = 0;
  for (const Call& call : calls) {
    *flag = 0;
    CHECK(cuStreamWaitValue32(held, flag_there, ++number, CU_STREAM_WAIT_VALUE_EQ));
    std::atomic<bool> done{false}, copied{false};
    const auto start = std::chrono::steady_clock::now();
    double took = 0;
    std::thread caller([&] {
      cuCtxSetCurrent(context);
      call.run();
      took = ms_since(start);
      done = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const bool waits = !done;
    std::thread beside([&] {
      cuCtxSetCurrent(context);
      cuMemcpyHtoDAsync(x, pinned, 4096, other);
      copied = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const bool others_wait = !copied;
    *flag = number;
    caller.join();
    beside.join();
    std::printf("%-40s %s %8.3f ms; a copy of another thread %s\n", call.name, waits ? "WAITS  " : "returns", took,
                others_wait ? "WAITS" : "goes on");
    CHECK(cuStreamSynchronize(held));
    CHECK(cuStreamSynchronize(other));
  }
}
