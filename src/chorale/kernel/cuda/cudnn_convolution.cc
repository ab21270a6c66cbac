#include "chorale/kernel/cuda/cudnn_convolution.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "chorale/device/cuda/context.h"
#include "chorale/kernel/cuda/pointwise.h"

namespace chorale::kernel::cuda {
namespace {

using Convolves = CudnnGraph::Convolves;

bool begins_at_pack(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0; }
bool lies_right(const Tensor& x) { return x.is_channels_last() && begins_at_pack(x); }

Tensor in_channels_last(const Tensor& x) {
  return Tensor::empty_strided(x.sizes(), channels_last_strides(x.sizes()), x.dtype(), x.device());
}
// x, or a copy in that order.
Tensor read_channels_last(const Tensor& x, Stream stream) {
  if (lies_right(x)) return x;
  Tensor copy = in_channels_last(x);
  copy_into(x, copy, stream);
  return copy;
}

Four sizes_of(const Tensor& x) { return {x.size(0), x.size(1), x.size(2), x.size(3)}; }
// Dimensions of one element too have the strides of the order, by which cuDNN knows it.
CudnnGraph::Id add_image(CudnnGraph& graph, const Tensor& x) {
  const Strides strides = channels_last_strides(x.sizes());
  return graph.memory(x.dtype(), sizes_of(x), {strides[0], strides[1], strides[2], strides[3]});
}

void describe(CudnnGraph& graph, Convolves wanted, const Tensor& x, const Tensor& w, const Tensor& y,
              const Tensor& bias, const ConvolutionAttrs& attrs) {
  const auto sides = [](const SpatialList& list) { return std::array<int64_t, 2>{list[0], list[1]}; };
  const CudnnGraph::Window window{sides(attrs.padding), sides(attrs.stride), sides(attrs.dilation)};
  const CudnnGraph::Id to_x = add_image(graph, x), to_w = add_image(graph, w), to_y = add_image(graph, y);
  if (!bias.defined()) return graph.convolution(wanted, window, to_x, to_w, to_y);
  const int64_t channels = y.size(1);
  const CudnnGraph::Id b = graph.memory(bias.dtype(), {1, channels, 1, 1}, {channels, 1, channels, channels});
  const Strides strides = channels_last_strides(y.sizes());
  const CudnnGraph::Like inner{sizes_of(y), DType::kF32, Four{strides[0], strides[1], strides[2], strides[3]}};
  const CudnnGraph::Id sums = graph.inside(inner);
  graph.convolution(wanted, window, to_x, to_w, sums);
  graph.pointwise(CUDNN_POINTWISE_ADD, inner, sums, b, 0, to_y);
}

bool is_recorded(Stream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  chorale::cuda::check(chorale::cuda::driver().cuStreamIsCapturing(static_cast<CUstream>(stream.handle), &status),
                       "convolving");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// The graph with its plan; null where cuDNN has none. A call while something is recorded can time nothing: its plan is
// cuDNN's guess, and stays.
CudnnGraph* convolution_graph(Convolves wanted, const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& bias,
                              const ConvolutionAttrs& attrs, std::span<void* const> addresses, Stream stream) {
  std::vector<int64_t> key{stream.device.index, static_cast<int64_t>(wanted), static_cast<int64_t>(x.dtype()),
                           bias.defined()};
  for (const Tensor* one : {&x, &w, &y}) key.insert(key.end(), one->sizes().begin(), one->sizes().end());
  for (const auto* list : {&attrs.stride, &attrs.padding, &attrs.dilation}) {
    for (const int64_t side : list->span()) key.push_back(side);
  }
  static std::mutex mutex;
  static auto* const graphs = new std::map<std::vector<int64_t>, std::unique_ptr<CudnnGraph>>;
  const std::lock_guard lock(mutex);
  const auto [place, added] = graphs->try_emplace(std::move(key));
  if (added) {
    auto made = std::make_unique<CudnnGraph>();
    describe(*made, wanted, x, w, y, bias, attrs);
    const bool rehearses = chorale::cuda::driver().rehearsal;
    const cudnnHandle_t handle = rehearses ? nullptr : cudnn_handle(stream);
    const bool found =
        rehearses || is_recorded(stream) ? made->plan(handle) : made->plan_by_time(handle, stream, addresses);
    if (found) place->second = std::move(made);
  }
  return place->second.get();
}

}  // namespace

bool asks_for_channels_last(const Tensor& x) {
  return x.dims() == 4 && is_half(x.dtype()) && !x.is_contiguous() && x.is_channels_last();
}

bool convolve_channels_last(Convolves wanted, const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& bias,
                            const ConvolutionAttrs& attrs, Stream stream) {
  if (x.elems() == 0 || w.elems() == 0 || y.elems() == 0) return false;
  chorale::cuda::make_current(stream.device);
  const Tensor given[] = {x, w, y};
  const size_t result = wanted == Convolves::kData ? 0 : wanted == Convolves::kWeight ? 1 : 2;
  Tensor used[3];
  for (size_t i = 0; i < 3; ++i) {
    if (i != result) {
      used[i] = read_channels_last(given[i], stream);
    } else {
      used[i] = lies_right(given[i]) ? given[i] : in_channels_last(given[i]);
    }
  }
  const Tensor shift = bias.defined() ? contiguous(bias, stream) : Tensor();
  std::vector<void*> addresses{used[0].raw(), used[1].raw(), used[2].raw()};
  if (shift.defined()) addresses.push_back(shift.raw());
  CudnnGraph* const graph = convolution_graph(wanted, used[0], used[1], used[2], shift, attrs, addresses, stream);
  if (!graph) return false;
  if (!chorale::cuda::driver().rehearsal) {
    const Tensor workspace = Tensor::empty({std::max<int64_t>(1, graph->workspace_bytes())}, DType::kU8, stream.device);
    graph->run(cudnn_handle(stream), addresses, workspace.raw());
  }
  if (!used[result].is(given[result])) copy_into(used[result], given[result], stream);
  return true;
}

}  // namespace chorale::kernel::cuda
