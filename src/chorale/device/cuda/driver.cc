#include "chorale/device/cuda/driver.h"

#include <dlfcn.h>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::cuda {
namespace {

#define CHORALE_CUDA_TEXT_OF(name) #name
#define CHORALE_CUDA_TEXT(name) CHORALE_CUDA_TEXT_OF(name)

Driver opened_driver() {
  if (config::env("CHORALE_CUDA_REHEARSAL")) return rehearsal_driver();
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
  CHORALE_CHECK_STATE(library,
                      "[cuda] libcuda.so.1 not found: this machine has no NVIDIA driver; install it, or use "
                      "the device cpu");
  Driver found;
#define CHORALE_CUDA_FIND(name)                                                                 \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, CHORALE_CUDA_TEXT(name))); \
  CHORALE_CHECK_STATE(found.name, "[cuda] the driver has no " CHORALE_CUDA_TEXT(name) "; this build needs CUDA " \
                      "12.3 or later: update NVIDIA's driver");
  CHORALE_CUDA_DRIVER(CHORALE_CUDA_FIND)
#undef CHORALE_CUDA_FIND
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver the_driver = [] {
    const Driver found = opened_driver();
    const CUresult result = found.cuInit(0);
    CHORALE_CHECK_STATE(result == CUDA_SUCCESS, "[cuda] the driver does not start (error ", static_cast<int>(result),
                        "): is there a GPU, and may this user open it? nvidia-smi says more");
    return found;
  }();
  return the_driver;
}

const char*& OpScope::current() {
  thread_local const char* op = nullptr;
  return op;
}

void raise(CUresult result, const char* tried) {
  const char* said = nullptr;
  if (driver().cuGetErrorString(result, &said) != CUDA_SUCCESS || !said) said = "an error without a text";
  const char* const op = OpScope::current();
  const std::string where = op ? concat("[", op, "] ") : std::string();
  // Work runs later than the call that asked for it: an error of a kernel shows at whatever comes next.
  const bool from_before = result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED ||
                           result == CUDA_ERROR_MISALIGNED_ADDRESS || result == CUDA_ERROR_ILLEGAL_INSTRUCTION ||
                           result == CUDA_ERROR_ASSERT || result == CUDA_ERROR_LAUNCH_TIMEOUT;
  throw StateError(concat(where, "CUDA says: ", tried, ": ", said, " (", static_cast<int>(result), ")",
                          from_before ? "; a kernel before this call did it, and the device is lost for this process: "
                                        "run again with CHORALE_DEBUG=DETAIL, which waits for every op and names it"
                                      : ""));
}

}  // namespace chorale::cuda
