#include "chorale/device/cuda/compiler.h"

#include <nvrtc.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/kernel_cache.h"
#include "chorale/device/cuda/libraries.h"

namespace chorale::cuda {

extern const std::string_view kPreludeCu;  // prelude.cu

namespace {

struct Nvrtc {
// The formatter moves such a list to the right each time.
// clang-format off
#define CHORALE_NVRTC(X) \
  X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcCompileProgram) X(nvrtcGetCUBINSize) X(nvrtcGetCUBIN) \
  X(nvrtcGetProgramLogSize) X(nvrtcGetProgramLog) X(nvrtcAddNameExpression) X(nvrtcGetLoweredName) \
  X(nvrtcGetErrorString)
// clang-format on
#define CHORALE_NVRTC_MEMBER(name) decltype(&::name) name = nullptr;
  CHORALE_NVRTC(CHORALE_NVRTC_MEMBER)
#undef CHORALE_NVRTC_MEMBER
};

const Nvrtc& nvrtc() {
  static const Nvrtc found = [] {
    void* const library = open_library({"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"},
                                       "install NVIDIA's cuda-nvrtc, or Python's nvidia-cuda-nvrtc");
    Nvrtc functions;
#define CHORALE_NVRTC_FIND(name) \
  functions.name = reinterpret_cast<decltype(functions.name)>(find_function(library, #name));
    CHORALE_NVRTC(CHORALE_NVRTC_FIND)
#undef CHORALE_NVRTC_FIND
    return functions;
  }();
  return found;
}

CompiledKernel compile(const KernelText& kernel, const std::string& arch) {
  const Nvrtc& api = nvrtc();
  nvrtcProgram program = nullptr;
  const auto check_nvrtc = [&](nvrtcResult result, const char* tried) {
    CHORALE_CHECK_STATE(result == NVRTC_SUCCESS, "[cuda] NVRTC says: ", tried, ": ", api.nvrtcGetErrorString(result));
  };
  check_nvrtc(api.nvrtcCreateProgram(&program, kernel.text.c_str(), "kernel.cu", 0, nullptr, nullptr), "taking a text");
  const std::unique_ptr<nvrtcProgram, void (*)(nvrtcProgram*)> owner(
      &program, [](nvrtcProgram* made) { nvrtc().nvrtcDestroyProgram(made); });
  check_nvrtc(api.nvrtcAddNameExpression(program, kernel.name.c_str()), "naming a kernel");
  const std::string target = "--gpu-architecture=" + arch;
  const char* const options[] = {target.c_str(), "-std=c++17", "-default-device",
                                 kernel.contract ? "--fmad=true" : "--fmad=false"};
  if (api.nvrtcCompileProgram(program, 4, options) != NVRTC_SUCCESS) {
    size_t bytes = 0;
    api.nvrtcGetProgramLogSize(program, &bytes);
    std::string log(bytes, ' ');
    if (bytes > 0) api.nvrtcGetProgramLog(program, log.data());
    throw InternalError(concat("the kernel ", kernel.name, " does not compile; please report this:\n", log));
  }
  CompiledKernel compiled;
  const char* lowered = nullptr;
  check_nvrtc(api.nvrtcGetLoweredName(program, kernel.name.c_str(), &lowered), "finding a kernel's name");
  compiled.name = lowered;
  size_t bytes = 0;
  check_nvrtc(api.nvrtcGetCUBINSize(program, &bytes), "measuring a kernel");
  compiled.binary.resize(bytes);
  check_nvrtc(api.nvrtcGetCUBIN(program, compiled.binary.data()), "reading a kernel");
  return compiled;
}

CUfunction load(const KernelText& kernel, const std::string& arch) {
  const std::string identity =
      concat(arch, kernel.contract ? " contracted " : " exact ", kernel.name, "\n", kernel.text);
  CompiledKernel compiled;
  if (!find_in_cache(identity, compiled)) {
    compiled = compile(kernel, arch);
    put_into_cache(identity, compiled);
  }
  CUmodule module = nullptr;
  check(driver().cuModuleLoadData(&module, compiled.binary.data()), "loading a kernel");
  CUfunction function = nullptr;
  check(driver().cuModuleGetFunction(&function, module, compiled.name.c_str()), "finding a kernel");
  return function;
}

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
struct Kernels {
  std::shared_mutex mutex;  // guards what follows
  std::unordered_map<std::string, CUfunction, TextHash, std::equal_to<>> known;
};
Kernels& kernels_of(Device device) {
  static auto* const all = new Kernels[kMostDevices];  // kernels are launched until the process ends
  return all[device.index];
}

// By key.
using Wanted = std::map<std::string, KernelText, std::less<>>;
thread_local Wanted* wanted_ahead = nullptr;

}  // namespace

bool makes_ahead() { return wanted_ahead != nullptr; }

void make_kernels_ahead(Device device, base::FunctionRef<void()> launches) {
  Wanted wanted;
  Wanted* const outer = std::exchange(wanted_ahead, &wanted);
  try {
    launches();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): who launches it in earnest is told
  }
  wanted_ahead = outer;
  std::vector<const Wanted::value_type*> all;
  for (const auto& one : wanted) all.push_back(&one);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < all.size(); i = next++) {
      try {
        find_kernel(device, all[i]->first, [&] { return all[i]->second; });
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): as above
      }
    }
  };
  constexpr size_t kMostThreads = 16;
  std::vector<std::thread> threads(
      std::min({all.size(), kMostThreads, size_t{std::max(1u, std::thread::hardware_concurrency())}}));
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
}

CUfunction find_kernel(Device device, std::string_view key, const std::function<KernelText()>& make) {
  Kernels& kernels = kernels_of(device);
  {
    const std::shared_lock lock(kernels.mutex);
    if (const auto found = kernels.known.find(key); found != kernels.known.end()) return found->second;
  }
  if (wanted_ahead) {
    if (wanted_ahead->find(key) == wanted_ahead->end()) wanted_ahead->emplace(key, make());
    return nullptr;
  }
  make_current(device);
  const CUfunction function = load(make(), facts_of(device).arch);
  const std::unique_lock lock(kernels.mutex);
  return kernels.known.emplace(std::string(key), function).first->second;
}

void launch_with(CUfunction kernel, const Grid& grid, Stream stream, void** arguments) {
  if (makes_ahead()) return;
  make_current(stream.device);
  constexpr unsigned kBytesWithoutAsking = 48 * 1024;
  if (grid.shared_bytes > kBytesWithoutAsking) {
    check(driver().cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      static_cast<int>(grid.shared_bytes)),
          "asking for shared memory");
  }
  check(driver().cuLaunchKernel(kernel, grid.x, grid.y, grid.z, grid.threads, 1, 1, grid.shared_bytes,
                                static_cast<CUstream>(stream.handle), arguments, nullptr),
        "launching a kernel");
}

int multiprocessors(Device device) { return facts_of(device).multiprocessors; }
int64_t shared_bytes(Device device) { return facts_of(device).shared_bytes; }

unsigned blocks_for(Device device, int64_t n, unsigned threads) {
  const int64_t blocks = (n + threads - 1) / threads;
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, int64_t{16} * multiprocessors(device)));
}

std::string_view prelude() { return kPreludeCu; }

const char* type_in_text(DType dtype) {
  constexpr const char* names[kDTypeCount] = {"bool", "u8",   "i8",    "i16",    "i32", "i64",
                                              "f16",  "bf16", "float", "double", "c64", "c128"};
  return names[static_cast<size_t>(dtype)];
}

}  // namespace chorale::cuda
