#include "chorale/kernel/cuda/cudnn_attention.h"

#include <cmath>
#include <map>
#include <memory>
#include <mutex>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/base/same_bits.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/timing.h"
#include "chorale/kernel/cuda/cudnn_graph.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cuda {
namespace {

// A plan takes a tenth of a second to build: small problems are left to flash.cu.
constexpr int64_t kLeastProducts = int64_t{1} << 26;
// Older ones give wrong gradients, or want memory that is cleared.
constexpr size_t kOldestCudnn = 91002;

Four four(const Tensor& x, bool strides) {
  Four result = {1, 1, 1, 1};
  for (int64_t d = 0; d < x.dims(); ++d)
    result[static_cast<size_t>(4 - x.dims() + d)] = strides ? x.stride(d) : x.size(d);
  // A batch of one has no stride of its own.
  if (strides && x.dims() == 3) result[0] = x.size(0) * x.stride(0);
  return result;
}
Four swapped(Four of) {
  std::swap(of[2], of[3]);
  return of;
}

// Operands are read 16 bytes at a time, and their last dimension is contiguous.
bool can_read(const Tensor& x) {
  if (x.stride(-1) != 1 || reinterpret_cast<uintptr_t>(x.raw()) % 16 != 0) return false;
  for (int64_t d = 0; d + 1 < x.dims(); ++d) {
    if (x.stride(d) % 8 != 0 || x.stride(d) <= 0) return false;
  }
  return true;
}

// What attention works on; also what a plan depends on.
struct AttentionProblem {
  AttentionProblem(const Tensor& q_, const Tensor& k_, const Tensor& v_, const AttentionAttrs& attrs)
      : q(q_), k(k_), v(v_), causal(attrs.causal), scale(static_cast<float>(attrs.scale)) {}

  bool fits(const Tensor& mask, const AttentionAttrs& attrs) const {
    const int64_t depth = q.size(-1);
    return (q.dims() == 3 || q.dims() == 4) && is_half(q.dtype()) && !mask.defined() && attrs.dropout_p == 0 &&
           depth % 8 == 0 && depth > 0 && depth <= 128 && v.size(-1) == depth && k.elems() > 0 && q.elems() > 0 &&
           q.elems() * k.size(-2) >= kLeastProducts && q.size(-2) > 1 && k.size(-2) > 1 && can_read(q) && can_read(k) &&
           can_read(v) && !same_bits();
  }
  Four scores() const { return {sizes(q)[0], sizes(q)[1], sizes(q)[2], sizes(k)[2]}; }
  Four lines() const { return {sizes(q)[0], sizes(q)[1], sizes(q)[2], 1}; }
  static Four sizes(const Tensor& x) { return four(x, false); }

  Tensor q, k, v;
  bool causal;
  float scale;
};

using Id = CudnnGraph::Id;
Id add_memory(CudnnGraph& graph, const Tensor& x) { return graph.memory(x.dtype(), four(x, false), four(x, true)); }
Id add_turned(CudnnGraph& graph, const Tensor& x) {
  return graph.memory(x.dtype(), swapped(four(x, false)), swapped(four(x, true)));
}
Id add_lines(CudnnGraph& graph, const Four& sizes) {
  return graph.memory(DType::kF32, sizes, {sizes[1] * sizes[2], sizes[2], 1, 1});
}
// Scores of keys behind their query are hidden.
Id hide_later_keys(CudnnGraph& graph, const Four& scores, Id s) {
  const Id row = graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, {scores, DType::kI32}, s, 0, 0, 0, 2);
  const Id column = graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, {scores, DType::kI32}, s, 0, 0, 0, 3);
  const Id seen = graph.pointwise(CUDNN_POINTWISE_CMP_GE, {scores, DType::kBool}, row, column);
  return graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, {scores}, s, graph.number(-INFINITY), seen);
}

// Memory: q, k, v, out, logsumexp.
void describe_forward(CudnnGraph& graph, const AttentionProblem& p, const Tensor& out) {
  const Four scores = p.scores(), lines = p.lines();
  const Id q = add_memory(graph, p.q), k = add_turned(graph, p.k), v = add_memory(graph, p.v),
           result = add_memory(graph, out), lse = add_lines(graph, lines);
  Id s = graph.pointwise(CUDNN_POINTWISE_MUL, {scores}, graph.product({scores}, q, k), graph.number(p.scale));
  if (p.causal) s = hide_later_keys(graph, scores, s);
  const Id most = graph.reduction(CUDNN_REDUCE_TENSOR_MAX, {lines}, s);
  const Id grown =
      graph.pointwise(CUDNN_POINTWISE_EXP, {scores}, graph.pointwise(CUDNN_POINTWISE_SUB, {scores}, s, most));
  const Id sum = graph.reduction(CUDNN_REDUCE_TENSOR_ADD, {lines}, grown);
  graph.pointwise(CUDNN_POINTWISE_ADD, {lines}, most, graph.pointwise(CUDNN_POINTWISE_LOG, {lines}, sum), 0, lse);
  const Id weights = graph.pointwise(CUDNN_POINTWISE_DIV, {scores, p.q.dtype()}, grown, sum);
  graph.product({AttentionProblem::sizes(out)}, weights, v, result);
}

// Memory: q, k, v, out, dout, logsumexp, sums of dout * out, dq in f32, dq, dk, dv.
void describe_backward(CudnnGraph& graph, const AttentionProblem& p, const Tensor& out, const Tensor& dout,
                       const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const Four scores = p.scores(), lines = p.lines(), q_sizes = AttentionProblem::sizes(p.q);
  const int64_t rows = scores[2], columns = scores[3];
  const CudnnGraph::Like whole{scores};
  const Id q = add_memory(graph, p.q), k = add_turned(graph, p.k), v = add_turned(graph, p.v),
           result = add_memory(graph, out), g = add_memory(graph, dout), lse = add_lines(graph, lines),
           sums = add_lines(graph, lines);
  const Id wide_dq = graph.memory(DType::kF32, q_sizes,
                                  {q_sizes[1] * q_sizes[2] * q_sizes[3], q_sizes[2] * q_sizes[3], q_sizes[3], 1});
  const Id to_dq = add_memory(graph, dq), to_dk = add_memory(graph, dk), to_dv = add_memory(graph, dv);
  const Id scale = graph.number(p.scale);

  const Id terms = graph.pointwise(CUDNN_POINTWISE_MUL, {q_sizes}, g, result);
  graph.pointwise(CUDNN_POINTWISE_MUL, {lines}, graph.reduction(CUDNN_REDUCE_TENSOR_ADD, {lines}, terms),
                  graph.number(1), 0, sums);
  Id s = graph.pointwise(CUDNN_POINTWISE_MUL, whole, graph.product(whole, q, k), scale);
  s = graph.pointwise(CUDNN_POINTWISE_SUB, whole, s, lse);
  if (p.causal) s = hide_later_keys(graph, scores, s);
  const Id weights = graph.pointwise(CUDNN_POINTWISE_EXP, whole, s);

  // A product with the scores' transpose; heads of queries that share one of keys are summed.
  const auto by_keys = [&](Id x, Id other, const Tensor& like, Id into) {
    const CudnnGraph::Like turned_scores{{scores[0], scores[1], columns, rows},
                                         p.q.dtype(),
                                         Four{scores[1] * rows * columns, rows * columns, 1, columns}};
    const Id seen = graph.reshaped(turned_scores, x);
    Four sizes = AttentionProblem::sizes(like);
    if (sizes[1] == scores[1]) {
      graph.product({sizes}, seen, other, into);
      return;
    }
    sizes[1] = scores[1];
    graph.reduction(CUDNN_REDUCE_TENSOR_ADD, {AttentionProblem::sizes(like)},
                    graph.product({sizes, p.q.dtype()}, seen, other), into);
  };
  by_keys(weights, g, dv, to_dv);
  Id ds = graph.pointwise(CUDNN_POINTWISE_SUB, whole, graph.product(whole, g, v), sums);
  ds = graph.pointwise(CUDNN_POINTWISE_MUL, whole, ds, weights);
  ds = graph.pointwise(CUDNN_POINTWISE_MUL, whole, ds, scale);
  by_keys(ds, q, dk, to_dk);
  const Id turned_k = graph.reshaped({four(p.k, false), p.k.dtype(), four(p.k, true)}, k);
  graph.product({q_sizes}, ds, turned_k, wide_dq);
  graph.pointwise(CUDNN_POINTWISE_IDENTITY, {q_sizes}, wide_dq, 0, 0, to_dq);
}

using PlanKey = std::vector<int64_t>;
PlanKey plan_key(const AttentionProblem& p, Stream stream, bool backward, std::initializer_list<const Tensor*> others) {
  PlanKey key{stream.device.index, static_cast<int64_t>(p.q.dtype()), backward, p.causal,
              static_cast<int64_t>(p.scale * 0x1p40f)};
  const auto add = [&](const Tensor& x) {
    for (const int64_t size : four(x, false)) key.push_back(size);
    for (const int64_t stride : four(x, true)) key.push_back(stride);
  };
  for (const Tensor* x : {&p.q, &p.k, &p.v}) add(*x);
  for (const Tensor* x : others) add(*x);
  return key;
}

// The graph of this key with its plan; null where cuDNN has none. The first call chooses by timing, where it can.
template <class Describe>
CudnnGraph* find_graph(const PlanKey& key, Stream stream, std::span<void* const> addresses, Describe&& describe) {
  static std::mutex mutex;
  static auto* const graphs = new std::map<PlanKey, std::unique_ptr<CudnnGraph>>;
  const std::lock_guard lock(mutex);
  const auto [place, added] = graphs->try_emplace(key);
  if (added) {
    auto made = std::make_unique<CudnnGraph>();
    describe(*made);
    // The rehearsal (Note [Rehearsal]) has no device to plan for; cuDNN then checks that the graph is well formed.
    const cudnnHandle_t handle = chorale::cuda::driver().rehearsal ? nullptr : cudnn_handle(stream);
    const bool timed = handle && !same_bits() && !chorale::cuda::is_recorded(stream) &&
                       made->plan_by_time(handle, stream, addresses, CudnnGraph::Bits::kAny);
    if (timed || made->plan(handle)) place->second = std::move(made);
  }
  return place->second.get();
}

std::vector<void*> addresses_of(std::initializer_list<const Tensor*> tensors) {
  std::vector<void*> addresses;
  addresses.reserve(tensors.size());
  for (const Tensor* x : tensors) addresses.push_back(x->raw());
  return addresses;
}
// Whether it was run.
bool run_graph(CudnnGraph* graph, std::span<void* const> addresses, Stream stream) {
  if (!graph) return false;
  if (chorale::cuda::driver().rehearsal) return true;
  const Tensor workspace = Tensor::empty({std::max<int64_t>(1, graph->workspace_bytes())}, DType::kU8, stream.device);
  graph->run(cudnn_handle(stream), addresses, workspace.raw());
  return true;
}

// Without cuDNN, or with one that is too old, attention is slower and not wrong.
bool is_usable() {
  static const bool usable = [] {
    try {
      const size_t version = cudnn().cudnnGetVersion();
      if (version >= kOldestCudnn) return true;
      log_info(concat("[attention] cuDNN ", version, " is older than ", kOldestCudnn, ": a slower kernel is used"));
    } catch (const StateError& error) {
      log_info(concat("[attention] a slower kernel is used: ", error.what()));
    }
    return false;
  }();
  return usable;
}

}  // namespace

bool cudnn_attention(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AttentionAttrs>();
  const AttentionProblem p(args.in[0], args.in[1], args.in[2], attrs);
  const Tensor &out = args.out[0], &lse = args.out[1];
  if (!p.fits(args.in[3], attrs) || !can_read(out) || !is_usable()) return false;
  if (chorale::cuda::makes_ahead()) return true;
  chorale::cuda::make_current(args.stream.device);
  const std::vector<void*> addresses = addresses_of({&p.q, &p.k, &p.v, &out, &lse});
  CudnnGraph* const graph = find_graph(plan_key(p, args.stream, false, {&out}), args.stream, addresses,
                                       [&](CudnnGraph& made) { describe_forward(made, p, out); });
  return run_graph(graph, addresses, args.stream);
}

bool cudnn_attention_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AttentionAttrs>();
  const AttentionProblem p(args.in[2], args.in[3], args.in[4], attrs);
  const Tensor &dq = args.out[0], &dk = args.out[1], &dv = args.out[2];
  // The gradient of logsumexp (second derivatives) has no place in the graph.
  if (!args.in[0].defined() || args.in[1].defined() || !p.fits(args.in[5], attrs) || !can_read(dq) || !can_read(dk) ||
      !can_read(dv) || !is_usable())
    return false;
  if (chorale::cuda::makes_ahead()) return true;
  const Stream stream = args.stream;
  chorale::cuda::make_current(stream.device);
  const Tensor out = can_read(args.in[6]) ? args.in[6] : contiguous(args.in[6], stream);
  const Tensor dout = can_read(args.in[0]) ? args.in[0] : contiguous(args.in[0], stream);
  const Tensor lse = contiguous(args.in[7], DType::kF32, stream);
  const Tensor sums = Tensor::empty(lse.sizes(), DType::kF32, stream.device);
  const Tensor wide_dq = Tensor::empty(p.q.sizes(), DType::kF32, stream.device);
  const std::vector<void*> addresses =
      addresses_of({&p.q, &p.k, &p.v, &out, &dout, &lse, &sums, &wide_dq, &dq, &dk, &dv});
  CudnnGraph* const graph = find_graph(plan_key(p, stream, true, {&out, &dout, &dq, &dk, &dv}), stream, addresses,
                                       [&](CudnnGraph& made) { describe_backward(made, p, out, dout, dq, dk, dv); });
  return run_graph(graph, addresses, stream);
}

}  // namespace chorale::kernel::cuda
