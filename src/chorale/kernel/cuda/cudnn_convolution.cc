#include "chorale/kernel/cuda/cudnn_convolution.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/timing.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/pointwise.h"

namespace chorale::cuda {
extern const std::string_view kImageCu;
}

namespace chorale::kernel::cuda {
namespace {

using Convolves = CudnnGraph::Convolves;

bool begins_at_pack(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0; }
bool lies_right(const Tensor& x) { return x.is_channels_last() && begins_at_pack(x); }

Tensor in_channels_last(const Shape& sizes, const Tensor& like) {
  return Tensor::empty_strided(sizes, channels_last_strides(sizes), like.dtype(), like.device());
}
Tensor contiguous_like(const Tensor& x) {
  return x.is_contiguous() ? x : Tensor::empty(x.sizes(), x.dtype(), x.device());
}
Tensor in_channels_last(const Tensor& x) { return in_channels_last(x.sizes(), x); }
// Copies between the two orders. Weights of 3 x 3 are turned in every step: by threads that keep a pack of channels.
void turn(const Tensor& from, const Tensor& to, Stream stream) {
  const bool forth = from.is_contiguous() && to.is_channels_last(),
             back = from.is_channels_last() && to.is_contiguous();
  constexpr int64_t kArea = 9, kPack = 8;
  if ((!forth && !back) || from.size(2) * from.size(3) != kArea || from.size(1) % kPack != 0 ||
      !is_half(from.dtype()) || !begins_at_pack(from) || !begins_at_pack(to))
    return copy_into(from, to, stream);
  const int64_t packs = from.elems() / (kArea * kPack);
  launch(instance(stream, chorale::cuda::kImageCu, "turn_channels", {from.dtype()}, forth ? "9, true" : "9, false"),
         {.x = blocks_for(stream.device, packs, 64), .threads = 64}, stream, from.raw(), to.raw(), packs, from.size(1));
}
// x, or a copy in that order.
Tensor read_channels_last(const Tensor& x, Stream stream) {
  if (lies_right(x)) return x;
  Tensor copy = in_channels_last(x);
  turn(x, copy, stream);
  return copy;
}

// Note [Folded images]. A first layer has few channels, 3 for colours, and tensor cores want packs of 8. Where its
// windows are two places apart, two by two places become one, of 16 channels: 4 for each, of which the last ones are
// zeros. The weight is folded alike, and windows of the folded image lie side by side. On ResNet-50's first layer that
// takes 0.65 ms instead of 1.77 (1.70 with channels of zeros alone), its gradient 0.46 instead of 1.13.
constexpr int64_t kFoldedChannels = 16;
int64_t folded_side(int64_t side) { return (side + 1) / 2; }
bool gains_by_folding(const Tensor& x, const ConvolutionAttrs& attrs) {
  const auto are = [](const auto& list, int64_t wanted) { return list[0] == wanted && list[1] == wanted; };
  return attrs.groups == 1 && x.size(1) <= kFoldedChannels / 4 && x.elems() <= INT32_MAX && are(attrs.stride, 2) &&
         are(attrs.dilation, 1);
}
// x with zeros before it, folded to this height and width.
Tensor fold(const Tensor& x, int64_t height, int64_t width, std::array<int64_t, 2> padding, Stream stream) {
  const Tensor from = read_channels_last(x, stream);
  Tensor made = in_channels_last({x.size(0), kFoldedChannels, height, width}, x);
  const int64_t places = x.size(0) * height * width;
  launch(instance(stream, chorale::cuda::kImageCu, "fold_places", {x.dtype()}),
         {.x = blocks_for(stream.device, places)}, stream, from.raw(), made.raw(), places, x.size(1), x.size(2),
         x.size(3), height, width, padding[0], padding[1]);
  return made;
}
// What the windows of y read of x.
Tensor folded(const Tensor& x, int64_t y_height, int64_t y_width, const Tensor& w, const ConvolutionAttrs& attrs,
              Stream stream) {
  return fold(x, y_height + folded_side(w.size(2)) - 1, y_width + folded_side(w.size(3)) - 1,
              {attrs.padding[0], attrs.padding[1]}, stream);
}
// The gradient of a weight from that of the folded one.
bool unfold(const Tensor& from, const Tensor& w, Stream stream) {
  const Tensor made = contiguous_like(w);
  launch(instance(stream, chorale::cuda::kImageCu, "unfold_places", {w.dtype()}),
         {.x = blocks_for(stream.device, w.elems())}, stream, from.raw(), made.raw(), w.elems(), w.size(1), w.size(2),
         w.size(3));
  if (!made.is(w)) copy_into(made, w, stream);
  return true;
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
    const bool found = rehearses || chorale::cuda::is_recorded(stream)
                           ? made->plan(handle)
                           : made->plan_by_time(handle, stream, addresses, CudnnGraph::Bits::kRepeat);
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
  if (wanted != Convolves::kData && gains_by_folding(x, attrs)) {
    const Tensor folded_x = folded(x, y.size(2), y.size(3), w, attrs, stream);
    const Shape sizes = {w.size(0), kFoldedChannels, folded_side(w.size(2)), folded_side(w.size(3))};
    ConvolutionAttrs plain = attrs;
    plain.stride = {1, 1};
    plain.padding = {0, 0};
    if (wanted == Convolves::kForward) {
      const Tensor folded_w = fold(w, sizes[2], sizes[3], {0, 0}, stream);
      return convolve_channels_last(wanted, folded_x, folded_w, y, bias, plain, stream);
    }
    const Tensor folded_w = in_channels_last(sizes, w);
    return convolve_channels_last(wanted, folded_x, folded_w, y, bias, plain, stream) && unfold(folded_w, w, stream);
  }
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
  if (chorale::cuda::makes_ahead()) {
    turn(used[result], given[result], stream);
    return true;
  }
  CudnnGraph* const graph = convolution_graph(wanted, used[0], used[1], used[2], shift, attrs, addresses, stream);
  if (!graph) return false;
  if (!chorale::cuda::driver().rehearsal) {
    const Tensor workspace = Tensor::empty({std::max<int64_t>(1, graph->workspace_bytes())}, DType::kU8, stream.device);
    graph->run(cudnn_handle(stream), addresses, workspace.raw());
  }
  if (!used[result].is(given[result])) turn(used[result], given[result], stream);
  return true;
}

}  // namespace chorale::kernel::cuda
