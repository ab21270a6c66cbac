// cuDNN, opened when it is first needed.
#pragma once

#include <cudnn.h>

#include "chorale/base/dtype.h"
#include "chorale/device/device.h"

namespace chorale::kernel::cuda {

// The formatter moves such a list to the right each time.
// clang-format off
#define CHORALE_CUDNN(X) \
  X(cudnnGetVersion) X(cudnnCreate) X(cudnnSetStream) X(cudnnGetErrorString) X(cudnnCreateTensorDescriptor) \
  X(cudnnSetTensorNdDescriptor) X(cudnnDestroyTensorDescriptor) X(cudnnCreateFilterDescriptor) \
  X(cudnnSetFilterNdDescriptor) X(cudnnDestroyFilterDescriptor) X(cudnnCreateConvolutionDescriptor) \
  X(cudnnSetConvolutionNdDescriptor) X(cudnnSetConvolutionGroupCount) X(cudnnSetConvolutionMathType) \
  X(cudnnDestroyConvolutionDescriptor) X(cudnnGetConvolutionForwardAlgorithm_v7) \
  X(cudnnGetConvolutionBackwardDataAlgorithm_v7) X(cudnnGetConvolutionBackwardFilterAlgorithm_v7) \
  X(cudnnConvolutionForward) X(cudnnConvolutionBackwardData) X(cudnnConvolutionBackwardFilter) \
  X(cudnnAddTensor) X(cudnnBackendCreateDescriptor) X(cudnnBackendDestroyDescriptor) \
  X(cudnnBackendSetAttribute) X(cudnnBackendGetAttribute) X(cudnnBackendFinalize) X(cudnnBackendExecute)
// clang-format on

struct Cudnn {
#define CHORALE_CUDNN_MEMBER(name) decltype(&::name) name = nullptr;
  CHORALE_CUDNN(CHORALE_CUDNN_MEMBER)
#undef CHORALE_CUDNN_MEMBER
};

// Throws StateError, saying what to install, where there is none.
const Cudnn& cudnn();
// Throws StateError: on behalf of which op, what was tried, and what cuDNN said.
void check_cudnn(cudnnStatus_t status, const char* tried);
// This thread's handle of the device, with the stream set.
cudnnHandle_t cudnn_handle(Stream stream);
cudnnDataType_t cudnn_type(DType dtype);

}  // namespace chorale::kernel::cuda
