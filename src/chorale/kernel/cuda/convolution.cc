#include "chorale/kernel/cuda/convolution.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "chorale/base/tf32.h"
#include "chorale/device/cuda/context.h"
#include "chorale/kernel/cuda/cudnn.h"
#include "chorale/kernel/cuda/cudnn_convolution.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cuda {
namespace {

// The three tensors of a convolution, whichever of them is the result, and how they meet.
class Problem {
 public:
  Problem(const Tensor& x, const Tensor& w, const Tensor& y, const ConvolutionAttrs& attrs) : dtype_(x.dtype()) {
    const Cudnn& api = cudnn();
    check_cudnn(api.cudnnCreateTensorDescriptor(&x_), "describing x");
    check_cudnn(api.cudnnCreateTensorDescriptor(&y_), "describing y");
    check_cudnn(api.cudnnCreateFilterDescriptor(&w_), "describing the weight");
    check_cudnn(api.cudnnCreateConvolutionDescriptor(&how_), "describing a convolution");
    set(x_, x);
    set(y_, y);
    std::vector<int> sizes = widened(w.sizes(), 1);
    check_cudnn(api.cudnnSetFilterNdDescriptor(w_, cudnn_type(dtype_), CUDNN_TENSOR_NCHW,
                                               static_cast<int>(sizes.size()), sizes.data()),
                "describing the weight");
    std::vector<int> pad, stride, dilation;
    if (attrs.stride.size() == 1) {  // a line is an image of height 1
      pad.push_back(0);
      stride.push_back(1);
      dilation.push_back(1);
    }
    for (size_t d = 0; d < attrs.stride.size(); ++d) {
      pad.push_back(static_cast<int>(attrs.padding[d]));
      stride.push_back(static_cast<int>(attrs.stride[d]));
      dilation.push_back(static_cast<int>(attrs.dilation[d]));
    }
    check_cudnn(api.cudnnSetConvolutionNdDescriptor(how_, static_cast<int>(pad.size()), pad.data(), stride.data(),
                                                    dilation.data(), CUDNN_CROSS_CORRELATION,
                                                    dtype_ == DType::kF64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT),
                "describing a convolution");
    check_cudnn(api.cudnnSetConvolutionGroupCount(how_, static_cast<int>(attrs.groups)), "setting groups");
    const cudnnMathType_t of_singles = tf32() ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH;
    check_cudnn(api.cudnnSetConvolutionMathType(how_, is_half(dtype_) ? CUDNN_TENSOR_OP_MATH : of_singles),
                "choosing arithmetic");
  }
  ~Problem() {
    cudnn().cudnnDestroyTensorDescriptor(x_);
    cudnn().cudnnDestroyTensorDescriptor(y_);
    cudnn().cudnnDestroyFilterDescriptor(w_);
    cudnn().cudnnDestroyConvolutionDescriptor(how_);
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  cudnnTensorDescriptor_t x() const { return x_; }
  cudnnTensorDescriptor_t y() const { return y_; }
  cudnnFilterDescriptor_t w() const { return w_; }
  cudnnConvolutionDescriptor_t how() const { return how_; }

  static void set(cudnnTensorDescriptor_t desc, const Tensor& x) {
    std::vector<int> sizes = widened(x.sizes(), 1),
                     strides = widened(x.strides(), x.dims() == 3 ? static_cast<int>(x.size(2) * x.stride(2)) : 1);
    check_cudnn(cudnn().cudnnSetTensorNdDescriptor(desc, cudnn_type(x.dtype()), static_cast<int>(sizes.size()),
                                                   sizes.data(), strides.data()),
                "describing a tensor");
  }

 private:
  // A line [N, C, L] is seen as [N, C, 1, L].
  template <class List>
  static std::vector<int> widened(const List& list, int between) {
    std::vector<int> result;
    for (size_t d = 0; d < list.size(); ++d) {
      if (d == 2 && list.size() == 3) result.push_back(between);
      result.push_back(static_cast<int>(list[d]));
    }
    return result;
  }

  DType dtype_;
  cudnnTensorDescriptor_t x_ = nullptr, y_ = nullptr;
  cudnnFilterDescriptor_t w_ = nullptr;
  cudnnConvolutionDescriptor_t how_ = nullptr;
};

// The first algorithm that repeats its bits and takes a bearable workspace.
template <class Perf>
const Perf* choose(const std::vector<Perf>& found, int count) {
  constexpr size_t kMostWorkspace = size_t{1} << 30;
  for (int i = 0; i < count; ++i) {
    const Perf& one = found[static_cast<size_t>(i)];
    if (one.status == CUDNN_STATUS_SUCCESS && one.determinism == CUDNN_DETERMINISTIC && one.memory <= kMostWorkspace)
      return &one;
  }
  return nullptr;
}
Tensor workspace_of(size_t bytes, Device device) {
  return bytes > 0 ? Tensor::empty({static_cast<int64_t>(bytes)}, DType::kU8, device) : Tensor();
}
void* address_of(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }

constexpr int kMostAlgorithms = 10;
[[noreturn]] void raise_no_algorithm(const char* what, DType dtype) {
  throw StateError(concat("[", what, "] cuDNN has no algorithm for this shape in ", dtype, "; compute on the CPU"));
}

struct Factors {
  double one64 = 1, zero64 = 0;
  float one32 = 1, zero32 = 0;
  bool wide;
  explicit Factors(DType dtype) : wide(dtype == DType::kF64) {}
  const void* one() const { return wide ? static_cast<const void*>(&one64) : &one32; }
  const void* zero() const { return wide ? static_cast<const void*>(&zero64) : &zero32; }
};

// A result that is computed in a dtype, in row-major order.
struct ConvolutionResult {
  ConvolutionResult(const Tensor& result, DType dtype, Stream its_stream) : target(result), stream(its_stream) {
    made = result.dtype() == dtype && result.is_contiguous() ? result
                                                             : Tensor::empty(result.sizes(), dtype, result.device());
  }
  void store() const {
    if (!made.is(target)) copy_into(made, target, stream);
  }
  Tensor made, target;
  Stream stream;
};

// Whether cuDNN did it. What it does not do in 16 bits is tried in another dtype; anything else is an error.
bool works(cudnnStatus_t status, DType dtype, const char* tried) {
  if (status != CUDNN_STATUS_SUCCESS && is_half(dtype)) return false;
  check_cudnn(status, tried);
  return true;
}

// The algorithm for these shapes: cuDNN takes milliseconds to choose one, so it is asked once. None: it has none.
template <class Perf, class Ask>
std::optional<Perf> algorithm_for(const Tensor& x, const Tensor& w, const Tensor& y, const ConvolutionAttrs& attrs,
                                  const Ask& ask) {
  std::vector<int64_t> key{x.device().index, static_cast<int64_t>(x.dtype()), static_cast<int64_t>(tf32()),
                           attrs.groups};
  const auto add = [&](const auto& list) {
    for (const int64_t one : list) key.push_back(one);
    key.push_back(-1);
  };
  for (const Tensor* tensor : {&x, &w, &y}) add(tensor->sizes());
  for (const auto* list : {&attrs.stride, &attrs.padding, &attrs.dilation}) add(list->span());
  static std::mutex mutex;
  static auto* const known = new std::map<std::vector<int64_t>, std::optional<Perf>>;
  const std::lock_guard lock(mutex);
  const auto [place, added] = known->try_emplace(std::move(key));
  if (!added) return place->second;
  std::vector<Perf> found(kMostAlgorithms);
  int count = 0;
  if (!works(ask(&count, found.data()), x.dtype(), "choosing an algorithm")) return {};
  if (const Perf* const best = choose(found, count)) place->second = *best;
  return place->second;
}

// Calls compute(dtype), which is false where cuDNN has no algorithm: 16-bit types are computed as they are, on tensor
// cores, or else in f32.
template <class Compute>
void in_some_dtype(const char* what, DType dtype, const Compute& compute) {
  if (compute(dtype) || (is_half(dtype) && compute(DType::kF32))) return;
  raise_no_algorithm(what, dtype);
}

bool rehearses() { return chorale::cuda::driver().rehearsal || chorale::cuda::makes_ahead(); }

}  // namespace

void convolution(const KernelArgs& args) {
  const Stream stream = args.stream;
  if (args.out[0].elems() == 0) return;
  if (asks_for_channels_last(args.out[0]) &&
      convolve_channels_last(CudnnGraph::Convolves::kForward, args.in[0], args.in[1], args.out[0], args.in[2],
                             args.attrs.get<ConvolutionAttrs>(), stream))
    return;
  if (rehearses()) return;
  chorale::cuda::make_current(stream.device);
  in_some_dtype("convolution", args.out[0].dtype(), [&](DType dtype) {
    const ConvolutionResult result(args.out[0], dtype, stream);
    const Tensor x = contiguous(args.in[0], dtype, stream), w = contiguous(args.in[1], dtype, stream);
    const Tensor& y = result.made;
    const auto& attrs = args.attrs.get<ConvolutionAttrs>();
    const Problem p(x, w, y, attrs);
    const cudnnHandle_t handle = cudnn_handle(stream);
    const auto chosen = algorithm_for<cudnnConvolutionFwdAlgoPerf_t>(x, w, y, attrs, [&](int* count, auto* found) {
      return cudnn().cudnnGetConvolutionForwardAlgorithm_v7(handle, p.x(), p.w(), p.how(), p.y(), kMostAlgorithms,
                                                            count, found);
    });
    if (!chosen) return false;
    const Tensor workspace = workspace_of(chosen->memory, stream.device);
    const Factors factors(x.dtype());
    if (!works(cudnn().cudnnConvolutionForward(handle, factors.one(), p.x(), x.raw(), p.w(), w.raw(), p.how(),
                                               chosen->algo, address_of(workspace), chosen->memory, factors.zero(),
                                               p.y(), y.raw()),
               dtype, "computing"))
      return false;
    if (args.in[2].defined()) {
      const Tensor bias = contiguous(args.in[2], dtype, stream);
      Shape sizes(y.sizes().size(), 1);
      sizes[1] = bias.elems();
      const Tensor seen = bias.view_as(sizes, contiguous_strides(sizes), bias.offset());
      cudnnTensorDescriptor_t desc = nullptr;
      check_cudnn(cudnn().cudnnCreateTensorDescriptor(&desc), "describing the bias");
      const std::unique_ptr<cudnnTensorStruct, void (*)(cudnnTensorDescriptor_t)> owner(
          desc, [](cudnnTensorDescriptor_t made) { cudnn().cudnnDestroyTensorDescriptor(made); });
      Problem::set(desc, seen);
      check_cudnn(cudnn().cudnnAddTensor(handle, factors.one(), desc, seen.raw(), factors.one(), p.y(), y.raw()),
                  "adding the bias");
    }
    result.store();
    return true;
  });
}

void convolution_transpose(const KernelArgs& args) {
  const Stream stream = args.stream;
  if (args.out[0].elems() == 0) return;
  if (args.in[0].elems() == 0) return set_zero(args.out[0], stream);
  if (asks_for_channels_last(args.out[0]) &&
      convolve_channels_last(CudnnGraph::Convolves::kData, args.out[0], args.in[1], args.in[0], Tensor(),
                             args.attrs.get<ConvolutionAttrs>(), stream))
    return;
  if (rehearses()) return;
  chorale::cuda::make_current(stream.device);
  in_some_dtype("convolution_transpose", args.out[0].dtype(), [&](DType dtype) {
    const ConvolutionResult result(args.out[0], dtype, stream);
    const Tensor y = contiguous(args.in[0], dtype, stream), w = contiguous(args.in[1], dtype, stream);
    const Tensor& x = result.made;
    const auto& attrs = args.attrs.get<ConvolutionAttrs>();
    const Problem p(x, w, y, attrs);
    const cudnnHandle_t handle = cudnn_handle(stream);
    const auto chosen = algorithm_for<cudnnConvolutionBwdDataAlgoPerf_t>(x, w, y, attrs, [&](int* count, auto* found) {
      return cudnn().cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, p.w(), p.y(), p.how(), p.x(), kMostAlgorithms,
                                                                 count, found);
    });
    if (!chosen) return false;
    const Tensor workspace = workspace_of(chosen->memory, stream.device);
    const Factors factors(x.dtype());
    if (!works(cudnn().cudnnConvolutionBackwardData(handle, factors.one(), p.w(), w.raw(), p.y(), y.raw(), p.how(),
                                                    chosen->algo, address_of(workspace), chosen->memory, factors.zero(),
                                                    p.x(), x.raw()),
               dtype, "computing"))
      return false;
    result.store();
    return true;
  });
}

void convolution_weight(const KernelArgs& args) {
  const Stream stream = args.stream;
  if (args.out[0].elems() == 0) return;
  if (args.in[0].elems() == 0 || args.in[1].elems() == 0) return set_zero(args.out[0], stream);
  if (asks_for_channels_last(args.in[0]) &&
      convolve_channels_last(CudnnGraph::Convolves::kWeight, args.in[0], args.out[0], args.in[1], Tensor(),
                             args.attrs.get<ConvolutionAttrs>(), stream))
    return;
  if (rehearses()) return;
  chorale::cuda::make_current(stream.device);
  in_some_dtype("convolution_weight", args.out[0].dtype(), [&](DType dtype) {
    const ConvolutionResult result(args.out[0], dtype, stream);
    const Tensor x = contiguous(args.in[0], dtype, stream), y = contiguous(args.in[1], dtype, stream);
    const Tensor& w = result.made;
    const auto& attrs = args.attrs.get<ConvolutionAttrs>();
    const Problem p(x, w, y, attrs);
    const cudnnHandle_t handle = cudnn_handle(stream);
    const auto chosen =
        algorithm_for<cudnnConvolutionBwdFilterAlgoPerf_t>(x, w, y, attrs, [&](int* count, auto* found) {
          return cudnn().cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle, p.x(), p.y(), p.how(), p.w(),
                                                                       kMostAlgorithms, count, found);
        });
    if (!chosen) return false;
    const Tensor workspace = workspace_of(chosen->memory, stream.device);
    const Factors factors(x.dtype());
    if (!works(cudnn().cudnnConvolutionBackwardFilter(handle, factors.one(), p.x(), x.raw(), p.y(), y.raw(), p.how(),
                                                      chosen->algo, address_of(workspace), chosen->memory,
                                                      factors.zero(), p.w(), w.raw()),
               dtype, "computing"))
      return false;
    result.store();
    return true;
  });
}

}  // namespace chorale::kernel::cuda
