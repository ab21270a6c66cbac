#include "chorale/kernel/cuda/cudnn.h"

#include <map>

#include "chorale/base/error.h"
#include "chorale/device/cuda/driver.h"
#include "chorale/device/cuda/libraries.h"

namespace chorale::kernel::cuda {

const Cudnn& cudnn() {
  static const Cudnn found = [] {
    void* const library = chorale::cuda::open_library({"libcudnn.so.9", "libcudnn.so"},
                                                      "install NVIDIA's cuDNN 9, or Python's nvidia-cudnn");
    Cudnn functions;
#define CHORALE_CUDNN_FIND(name) \
  functions.name = reinterpret_cast<decltype(functions.name)>(chorale::cuda::find_function(library, #name));
    CHORALE_CUDNN(CHORALE_CUDNN_FIND)
#undef CHORALE_CUDNN_FIND
    return functions;
  }();
  return found;
}

void check_cudnn(cudnnStatus_t status, const char* tried) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  const char* const op = chorale::cuda::OpScope::current();
  throw StateError(
      concat("[", op ? op : "convolution", "] cuDNN says: ", tried, ": ", cudnn().cudnnGetErrorString(status)));
}

// A handle belongs to a thread: it holds the stream that is set.
cudnnHandle_t cudnn_handle(Stream stream) {
  thread_local std::map<int, cudnnHandle_t> handles;
  cudnnHandle_t& handle = handles[stream.device.index];
  if (!handle) check_cudnn(cudnn().cudnnCreate(&handle), "starting");
  check_cudnn(cudnn().cudnnSetStream(handle, static_cast<cudaStream_t>(stream.handle)), "choosing a stream");
  return handle;
}

cudnnDataType_t cudnn_type(DType dtype) {
  return dtype == DType::kF64    ? CUDNN_DATA_DOUBLE
         : dtype == DType::kF32  ? CUDNN_DATA_FLOAT
         : dtype == DType::kF16  ? CUDNN_DATA_HALF
         : dtype == DType::kBF16 ? CUDNN_DATA_BFLOAT16
         : dtype == DType::kI32  ? CUDNN_DATA_INT32
                                 : CUDNN_DATA_BOOLEAN;
}

}  // namespace chorale::kernel::cuda
