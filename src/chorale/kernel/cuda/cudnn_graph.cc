#include "chorale/kernel/cuda/cudnn_graph.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/timing.h"

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

// Whether a configuration of an engine gives the same bits each time; `engine` is an empty descriptor.
bool repeats_bits(cudnnBackendDescriptor_t configuration, cudnnBackendDescriptor_t engine) {
  int64_t count = 0;
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  bool known =
      cudnn().cudnnBackendGetAttribute(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                       &count, static_cast<void*>(&engine)) == CUDNN_STATUS_SUCCESS;
  known =
      known && cudnn().cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                                CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes) == CUDNN_STATUS_SUCCESS;
  cudnn().cudnnBackendDestroyDescriptor(engine);
  return known && std::find(notes, notes + count, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) == notes + count;
}

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

void CudnnGraph::convolution(Convolves wanted, const Window& window, Id x, Id w, Id y) {
  const Descriptor how = create(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  set_type(how, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  set_bytes(how, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  set_integer(how, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 2);
  const auto set_sides = [&](cudnnBackendAttributeName_t name, const std::array<int64_t, 2>& sides) {
    set_bytes(how, name, CUDNN_TYPE_INT64, 2, sides.data());
  };
  set_sides(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, window.padding);
  set_sides(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, window.padding);
  set_sides(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, window.stride);
  set_sides(CUDNN_ATTR_CONVOLUTION_DILATIONS, window.dilation);
  finish(how);
  struct Names {
    cudnnBackendDescriptorType_t operation;
    cudnnBackendAttributeName_t how, x, w, y, alpha, beta;
  };
  constexpr Names kNames[] = {
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};
  const Names& names = kNames[static_cast<size_t>(wanted)];
  const Descriptor made = create(names.operation);
  set_descriptor(made, names.how, how);
  set_descriptor(made, names.x, tensor(x));
  set_descriptor(made, names.w, tensor(w));
  set_descriptor(made, names.y, tensor(y));
  const float one = 1, zero = 0;
  set_bytes(made, names.alpha, CUDNN_TYPE_FLOAT, 1, &one);
  set_bytes(made, names.beta, CUDNN_TYPE_FLOAT, 1, &zero);
  finish(made);
  operations_.push_back(made);
}

std::vector<CudnnGraph::Descriptor> CudnnGraph::proposals(cudnnHandle_t handle) {
  const Descriptor graph = create(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set_bytes(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            static_cast<int64_t>(operations_.size()), static_cast<const void*>(operations_.data()));
  if (handle) set_bytes(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, static_cast<void*>(&handle));
  if (!handle) {
    finish(graph);
    return {};
  }
  if (cudnn().cudnnBackendFinalize(graph) != CUDNN_STATUS_SUCCESS) return {};
  const Descriptor choice = create(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  set_descriptor(choice, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  set_bytes(choice, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (cudnn().cudnnBackendFinalize(choice) != CUDNN_STATUS_SUCCESS) return {};
  int64_t count = 0;
  check_cudnn(cudnn().cudnnBackendGetAttribute(choice, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0,
                                               &count, nullptr),
              "choosing an algorithm");
  std::vector<Descriptor> found(static_cast<size_t>(count));
  for (Descriptor& one : found) one = create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  if (count == 0 ||
      cudnn().cudnnBackendGetAttribute(choice, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count,
                                       &count, static_cast<void*>(found.data())) != CUDNN_STATUS_SUCCESS)
    return {};
  found.resize(static_cast<size_t>(count));
  return found;
}

CudnnGraph::Plan CudnnGraph::build(cudnnHandle_t handle, Descriptor engine) {
  Plan plan;
  plan.made = create(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  set_bytes(plan.made, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, static_cast<void*>(&handle));
  set_descriptor(plan.made, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engine);
  if (cudnn().cudnnBackendFinalize(plan.made) != CUDNN_STATUS_SUCCESS) {
    cudnn().cudnnBackendDestroyDescriptor(plan.made);
    return {};
  }
  int64_t one = 0;
  check_cudnn(cudnn().cudnnBackendGetAttribute(plan.made, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                               &one, &plan.workspace_bytes),
              "asking for a workspace");
  return plan;
}

// Side by side, since cuDNN compiles most of a second for one of attention.
std::vector<CudnnGraph::Plan> CudnnGraph::build_all(std::span<const Descriptor> engines, Device device) {
  static std::mutex mutex;
  static auto* const handles = new std::map<int, std::vector<cudnnHandle_t>>;  // by device; each for one thread
  const std::lock_guard lock(mutex);
  std::vector<cudnnHandle_t>& own = (*handles)[device.index];
  if (own.size() < engines.size()) own.resize(engines.size(), nullptr);
  std::vector<Plan> plans(engines.size());
  std::vector<std::exception_ptr> errors(engines.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < engines.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        chorale::cuda::make_current(device);
        if (!own[i]) check_cudnn(cudnn().cudnnCreate(&own[i]), "starting");
        plans[i] = build(own[i], engines[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return plans;
}

bool CudnnGraph::plan(cudnnHandle_t handle) {
  for (const Descriptor engine : proposals(handle)) {
    plan_ = build(handle, engine);
    if (plan_.made) return true;
  }
  return !handle;
}

bool CudnnGraph::plan_by_time(cudnnHandle_t handle, Stream stream, std::span<void* const> addresses, Bits bits) {
  // Engines of attention are compiled, and those behind the first few have not been the fastest.
  const size_t most_tried = bits == Bits::kAny ? 3 : 6;
  constexpr int kRuns = 3;
  constexpr int64_t kMostWorkspace = int64_t{1} << 30;
  std::vector<Descriptor> engines;
  for (const Descriptor engine : proposals(handle)) {
    if (bits == Bits::kAny || repeats_bits(engine, create(CUDNN_BACKEND_ENGINE_DESCRIPTOR))) engines.push_back(engine);
  }
  Plan best;
  float least = 0;
  size_t tried = 0;
  for (size_t first = 0; first < engines.size() && tried < most_tried;) {
    const size_t count = std::min(most_tried - tried, engines.size() - first);
    const std::vector<Plan> plans = build_all(std::span(engines).subspan(first, count), stream.device);
    first += count;
    for (const Plan& plan : plans) {
      if (!plan.made || plan.workspace_bytes > kMostWorkspace) continue;
      ++tried;
      plan_ = plan;
      const Tensor workspace = Tensor::empty({std::max<int64_t>(1, plan.workspace_bytes)}, DType::kU8, stream.device);
      // The first run loads the kernel.
      if (execute(handle, addresses, workspace.raw()) != CUDNN_STATUS_SUCCESS) continue;
      const float took = chorale::cuda::time_on(stream, [&] {
        for (int i = 0; i < kRuns; ++i) check_cudnn(execute(handle, addresses, workspace.raw()), "timing a graph");
      });
      if (best.made && took >= least) continue;
      best = plan;
      least = took;
    }
  }
  plan_ = best;
  return best.made != nullptr;
}

void CudnnGraph::run(cudnnHandle_t handle, std::span<void* const> addresses, void* workspace) {
  check_cudnn(execute(handle, addresses, workspace), "running a graph");
}

cudnnStatus_t CudnnGraph::execute(cudnnHandle_t handle, std::span<void* const> addresses, void* workspace) {
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
  const cudnnStatus_t status = cudnn().cudnnBackendExecute(handle, plan_.made, pack);
  cudnn().cudnnBackendDestroyDescriptor(pack);
  return status;
}

}  // namespace chorale::kernel::cuda
