// A graph of cuDNN's operations on tensors of four dimensions, fused by cuDNN into kernels of its own.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "chorale/device/device.h"
#include "chorale/kernel/cuda/cudnn.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel::cuda {

using Four = std::array<int64_t, 4>;

class CudnnGraph {
 public:
  // Numbers tensors; 0 stands for none.
  using Id = int64_t;
  struct Like {  // of a tensor inside the graph
    Four sizes;
    DType dtype = DType::kF32;
    std::optional<Four> strides = std::nullopt;  // row-major unless said
  };

  CudnnGraph() = default;
  // Lives as long as the process, as the plans in it do.
  CudnnGraph(const CudnnGraph&) = delete;
  CudnnGraph& operator=(const CudnnGraph&) = delete;

  // Memory whose address is given at each run, in the order of these calls.
  Id memory(DType dtype, const Four& sizes, const Four& strides);
  // A result that no memory holds.
  Id inside(const Like& like) { return result(like, 0); }
  // A number that every run has.
  Id number(float value);
  // Results lie inside the graph, or in memory where `into` names it.
  Id pointwise(cudnnPointwiseMode_t mode, const Like& like, Id x, Id b = 0, Id t = 0, Id into = 0,
               std::optional<int64_t> axis = std::nullopt);
  Id product(const Like& like, Id a, Id b, Id into = 0);
  Id reduction(cudnnReduceTensorOp_t op, const Like& like, Id x, Id into = 0);
  Id reshaped(const Like& like, Id x);
  // One of the three tensors of a convolution from the other two.
  enum class Convolves { kForward, kData, kWeight };
  struct Window {  // of height and width
    std::array<int64_t, 2> padding, stride, dilation;
  };
  void convolution(Convolves wanted, const Window& window, Id x, Id w, Id y);

  // Finds a plan: the one that cuDNN thinks best. False: cuDNN has none for this graph. Without a handle the graph is
  // only checked.
  bool plan(cudnnHandle_t handle);
  // The same; of cuDNN's first guesses the one that is fastest on this memory, into which the results are written,
  // where asked for only of those that repeat their bits. The host waits for the stream.
  enum class Bits : uint8_t { kRepeat, kAny };
  bool plan_by_time(cudnnHandle_t handle, Stream stream, std::span<void* const> addresses, Bits bits);
  int64_t workspace_bytes() const { return plan_.workspace_bytes; }
  void run(cudnnHandle_t handle, std::span<void* const> addresses, void* workspace);

 private:
  using Descriptor = cudnnBackendDescriptor_t;
  Id add_tensor(DType dtype, const Four& sizes, const Four& strides, bool inside, bool by_value);
  static Descriptor create(cudnnBackendDescriptorType_t type);
  Descriptor tensor(Id id) const { return tensors_[static_cast<size_t>(id - 1)]; }
  Id result(const Like& like, Id into);
  struct Plan {
    Descriptor made = nullptr;  // null: this engine has none
    int64_t workspace_bytes = 0;
  };
  // What cuDNN proposes, best guess first.
  std::vector<Descriptor> proposals(cudnnHandle_t handle);
  static Plan build(cudnnHandle_t handle, Descriptor engine);
  static std::vector<Plan> build_all(std::span<const Descriptor> engines, Device device);
  cudnnStatus_t execute(cudnnHandle_t handle, std::span<void* const> addresses, void* workspace);

  std::vector<Descriptor> tensors_, operations_;
  std::vector<Id> memory_ids_, number_ids_;
  std::vector<float> numbers_;
  Plan plan_;
};

}  // namespace chorale::kernel::cuda
