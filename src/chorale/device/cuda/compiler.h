// Kernels as texts of CUDA C++, compiled by NVRTC when they are first launched and kept on disk: a text is read once
// per machine and user, not once per run.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "chorale/base/dtype.h"
#include "chorale/base/parallel_for.h"
#include "chorale/device/cuda/driver.h"
#include "chorale/device/device.h"

namespace chorale::cuda {

struct KernelText {
  std::string text;
  std::string name;      // of the kernel, as an expression: "softmax<float>"
  bool contract = true;  // a * b + c may be rounded once
};

// The kernel that `make` describes. It is asked only for a key that this process has not seen, so the key names text,
// types and variant.
CUfunction find_kernel(Device device, std::string_view key, const std::function<KernelText()>& make);

// Calls `launches`, in which this thread launches nothing and calls no library, and compiles the kernels that it would
// have launched: on several threads, where one after the other took five seconds for a step of GPT-2. An error of
// theirs is left to the launch.
void make_kernels_ahead(Device device, base::FunctionRef<void()> launches);
// Whether this thread is in there.
bool makes_ahead();

struct Grid {
  unsigned x = 1, y = 1, z = 1;
  unsigned threads = 256;
  unsigned shared_bytes = 0;
};
void launch_with(CUfunction kernel, const Grid& grid, Stream stream, void** arguments);
// Arguments are passed as bytes: their types must be those of the kernel's parameters.
template <class... Args>
void launch(CUfunction kernel, const Grid& grid, Stream stream, const Args&... args) {
  const void* arguments[] = {&args...};
  launch_with(kernel, grid, stream, const_cast<void**>(arguments));
}

// Blocks of `threads` for n elements, at most as many as keep the device busy: kernels loop over the rest.
unsigned blocks_for(Device device, int64_t n, unsigned threads = 256);
int multiprocessors(Device device);
// Shared memory of a multiprocessor.
int64_t shared_bytes(Device device);

// What all texts begin with: types, conversions, helpers (prelude.cu).
std::string_view prelude();
// The name of a dtype's type in these texts.
const char* type_in_text(DType dtype);

}  // namespace chorale::cuda
