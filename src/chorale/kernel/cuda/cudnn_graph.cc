#include "chorale/kernel/cuda/cudnn_graph.h"

#include "chorale/base/error.h"

namespace chorale::kernel::cuda {
namespace {

constexpr int64_t kAlignment = 16;

void set_bytes(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
               int64_t count, const void* values) {
  check_cudnn(cudnn().cudnnBackendSetAttribute(of, name, type, count, values), "describing a graph");
}
void set_descriptor(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t value) {
  set_bytes(of, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, static_cast<const void*>(&value));
}
void set_integer(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, int64_t value) {
  set_bytes(of, name, CUDNN_TYPE_INT64, 1, &value);
}
void set_type(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnDataType_t value) {
  set_bytes(of, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}
void finish(cudnnBackendDescriptor_t of) { check_cudnn(cudnn().cudnnBackendFinalize(of), "describing a graph"); }

Four row_major(const Four& sizes) { return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1}; }

}  // namespace

CudnnGraph::Descriptor CudnnGraph::create(cudnnBackendDescriptorType_t type) {
  Descriptor made = nullptr;
  check_cudnn(cudnn().cudnnBackendCreateDescriptor(type, &made), "describing a graph");
  return made;
}

CudnnGraph::Id CudnnGraph::add_tensor(DType dtype, const Four& sizes, const Four& strides, bool inside, bool by_value) {
  const Descriptor made = create(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensors_.push_back(made);
  const auto id = static_cast<Id>(tensors_.size());
  set_integer(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  set_type(made, CUDNN_ATTR_TENSOR_DATA_TYPE, cudnn_type(dtype));
  set_bytes(made, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, sizes.data());
  set_bytes(made, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.data());
  set_integer(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kAlignment);
  set_bytes(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &inside);
  set_bytes(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
  finish(made);
  return id;
}

CudnnGraph::Id CudnnGraph::memory(DType dtype, const Four& sizes, const Four& strides) {
  memory_ids_.push_back(add_tensor(dtype, sizes, strides, false, false));
  return memory_ids_.back();
}
CudnnGraph::Id CudnnGraph::number(float value) {
  numbers_.push_back(value);
  number_ids_.push_back(add_tensor(DType::kF32, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true));
  return number_ids_.back();
}
CudnnGraph::Id CudnnGraph::result(const Like& like, Id into) {
  return into ? into : add_tensor(like.dtype, like.sizes, like.strides.value_or(row_major(like.sizes)), true, false);
}

CudnnGraph::Id CudnnGraph::pointwise(cudnnPointwiseMode_t mode, const Like& like, Id x, Id b, Id t, Id into,
                                     std::optional<int64_t> axis) {
  const Id y = result(like, into);
  const Descriptor how = create(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  set_bytes(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  set_type(how, CUDNN_ATTR_POINTWISE_MATH_PREC, like.dtype == DType::kBool ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT);
  if (axis) set_integer(how, CUDNN_ATTR_POINTWISE_AXIS, *axis);
  finish(how);
  const Descriptor made = create(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  set_descriptor(made, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
  set_descriptor(made, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, tensor(x));
  if (b) set_descriptor(made, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, tensor(b));
  if (t) set_descriptor(made, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, tensor(t));
  set_descriptor(made, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensor(y));
  finish(made);
  operations_.push_back(made);
  return y;
}

CudnnGraph::Id CudnnGraph::product(const Like& like, Id a, Id b, Id into) {
  const Id c = result(like, into);
  const Descriptor how = create(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  set_type(how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
  finish(how);
  const Descriptor made = create(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  set_descriptor(made, CUDNN_ATTR_OPERATION_MATMUL_ADESC, tensor(a));
  set_descriptor(made, CUDNN_ATTR_OPERATION_MATMUL_BDESC, tensor(b));
  set_descriptor(made, CUDNN_ATTR_OPERATION_MATMUL_CDESC, tensor(c));
  set_descriptor(made, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
  finish(made);
  operations_.push_back(made);
  return c;
}

CudnnGraph::Id CudnnGraph::reduction(cudnnReduceTensorOp_t op, const Like& like, Id x, Id into) {
  const Id y = result(like, into);
  const Descriptor how = create(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  set_bytes(how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op);
  set_type(how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  finish(how);
  const Descriptor made = create(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  set_descriptor(made, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, tensor(x));
  set_descriptor(made, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, tensor(y));
  set_descriptor(made, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
  finish(made);
  operations_.push_back(made);
  return y;
}

CudnnGraph::Id CudnnGraph::reshaped(const Like& like, Id x) {
  const Id y = result(like, 0);
  const Descriptor made = create(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  set_descriptor(made, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, tensor(x));
  set_descriptor(made, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, tensor(y));
  finish(made);
  operations_.push_back(made);
  return y;
}

bool CudnnGraph::plan(cudnnHandle_t handle) {
  const Descriptor graph = create(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set_bytes(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            static_cast<int64_t>(operations_.size()), static_cast<const void*>(operations_.data()));
  if (handle) set_bytes(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, static_cast<void*>(&handle));
  if (!handle) {
    finish(graph);
    return true;
  }
  if (cudnn().cudnnBackendFinalize(graph) != CUDNN_STATUS_SUCCESS) return false;
  const Descriptor choice = create(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  set_descriptor(choice, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  set_bytes(choice, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (cudnn().cudnnBackendFinalize(choice) != CUDNN_STATUS_SUCCESS) return false;
  int64_t count = 0;
  check_cudnn(cudnn().cudnnBackendGetAttribute(choice, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0,
                                               &count, nullptr),
              "choosing an algorithm");
  std::vector<Descriptor> found(static_cast<size_t>(count));
  for (Descriptor& one : found) one = create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  if (count == 0 ||
      cudnn().cudnnBackendGetAttribute(choice, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count,
                                       &count, static_cast<void*>(found.data())) != CUDNN_STATUS_SUCCESS)
    return false;
  found.resize(static_cast<size_t>(count));
  // The first that can be built: cuDNN's best guess comes first.
  for (const Descriptor engine : found) {
    const Descriptor made = create(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set_bytes(made, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, static_cast<void*>(&handle));
    set_descriptor(made, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engine);
    if (cudnn().cudnnBackendFinalize(made) != CUDNN_STATUS_SUCCESS) {
      cudnn().cudnnBackendDestroyDescriptor(made);
      continue;
    }
    plan_ = made;
    int64_t one = 0;
    check_cudnn(cudnn().cudnnBackendGetAttribute(made, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                                 &one, &workspace_bytes_),
                "asking for a workspace");
    return true;
  }
  return false;
}

void CudnnGraph::run(cudnnHandle_t handle, std::span<void* const> addresses, void* workspace) {
  CHORALE_INVARIANT(addresses.size() == memory_ids_.size(), "a graph of ", memory_ids_.size(), " tensors is given ",
                    addresses.size());
  std::vector<int64_t> ids = memory_ids_;
  std::vector<void*> data(addresses.begin(), addresses.end());
  for (size_t i = 0; i < numbers_.size(); ++i) {
    ids.push_back(number_ids_[i]);
    data.push_back(&numbers_[i]);
  }
  const Descriptor pack = create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  const auto count = static_cast<int64_t>(ids.size());
  set_bytes(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids.data());
  set_bytes(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count,
            static_cast<const void*>(data.data()));
  set_bytes(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, static_cast<const void*>(&workspace));
  finish(pack);
  const cudnnStatus_t status = cudnn().cudnnBackendExecute(handle, plan_, pack);
  cudnn().cudnnBackendDestroyDescriptor(pack);
  check_cudnn(status, "running a graph");
}

}  // namespace chorale::kernel::cuda
