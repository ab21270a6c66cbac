// Attention as products and a softmax between them, for every dtype, mask and grouping; where it can, flash.cc does it
// without scores in memory.
#include "chorale/kernel/cuda/attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "chorale/kernel/cuda/cudnn_attention.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/flash.h"
#include "chorale/kernel/cuda/product.h"
#include "chorale/kernel/cuda/reduce.h"
#include "chorale/kernel/joined_heads.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::cuda {
extern const std::string_view kAttentionCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kAttentionCu;
using chorale::cuda::type_in_text;

// Queries of causal attention that are worked on at a time.
constexpr int64_t kCausalPiece = 256;

// What kernels see (attention.cu).
struct Scores {
  int64_t heads = 1, queries = 0, keys = 0, depth = 0;
  int64_t first = 0, rows = 0, columns = 0;
  int64_t causal = 0, lead_dims = 0;
  int64_t lead_sizes[8] = {}, mask_strides[8] = {};
  int64_t mask_query = 0, mask_key = 0;
  double scale = 1, keep_scale = 1;
  uint32_t threshold = 0, drops = 0;
  Drawn drawn{};
};

// Matrices [heads, rows, columns] of a tensor [leading…, rows, columns]; `repeats` heads of queries share one of these.
Tensor as_heads(const Tensor& x, int64_t repeats, Stream stream) {
  const int64_t rows = x.size(-2), columns = x.size(-1);
  const int64_t heads = rows * columns == 0 ? 0 : x.elems() / (rows * columns);
  if (repeats == 1) {
    const Tensor dense = contiguous(x, stream);
    return dense.view_as({heads, rows, columns}, {rows * columns, columns, 1}, dense.offset());
  }
  const Tensor dense = contiguous(x, stream);
  const Tensor repeated =
      dense.view_as({heads, repeats, rows, columns}, {rows * columns, 0, columns, 1}, dense.offset());
  const Tensor copied = contiguous(repeated, stream);
  return copied.view_as({heads * repeats, rows, columns}, {rows * columns, columns, 1}, 0);
}
Tensor turned(const Tensor& x) {
  return x.view_as({x.size(0), x.size(2), x.size(1)}, {x.stride(0), x.stride(2), x.stride(1)}, x.offset());
}

// Rows [first, first + count) of each matrix.
Tensor rows_of(const Tensor& x, int64_t first, int64_t count) {
  return x.view_as({x.size(0), count, x.size(2)}, {x.stride(0), x.stride(1), x.stride(2)},
                   x.offset() + first * x.stride(1));
}

struct AttentionCall {
  AttentionCall(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& its_mask,
                const Tensor& stretch, const AttentionAttrs& attrs, Stream its_stream)
      : stream(its_stream), dtype(queries.dtype()), compute(compute_of(queries.dtype())), mask(its_mask) {
    if (queries.dims() >= 3 && keys.size(-3) > 0) repeats = queries.size(-3) / keys.size(-3);
    q = as_heads(queries, 1, stream);
    k = as_heads(keys, repeats, stream);
    v = as_heads(values, repeats, stream);
    Shape sizes = queries.sizes();
    sizes.back() = keys.size(-2);
    s.heads = q.size(0);
    s.queries = queries.size(-2);
    s.keys = keys.size(-2);
    s.depth = values.size(-1);
    s.causal = attrs.causal ? 1 : 0;
    s.scale = attrs.scale;
    s.lead_dims = queries.dims() - 2;
    if (mask.defined()) {
      const Strides strides = broadcast_strides(mask.sizes(), mask.strides(), sizes);
      for (size_t d = 0; d < static_cast<size_t>(s.lead_dims); ++d) s.mask_strides[d] = strides[d];
      s.mask_query = strides[strides.size() - 2];
      s.mask_key = strides[strides.size() - 1];
    }
    for (size_t d = 0; d < static_cast<size_t>(s.lead_dims); ++d) s.lead_sizes[d] = sizes[d];
    if (attrs.dropout_p > 0) {
      s.drops = 1;
      s.threshold = static_cast<uint32_t>(std::min(std::nearbyint(attrs.dropout_p * 0x1p32), 0x1p32 - 1));
      s.keep_scale = attrs.dropout_p < 1 ? 1 / (1 - attrs.dropout_p) : 0;
      s.drawn = drawn_for(stretch, sizes);
    }
  }

  // Queries are taken in pieces: those of causal attention see only the keys up to their end.
  int64_t piece() const {
    return s.causal != 0 && s.keys >= 2 * kCausalPiece ? kCausalPiece : std::max<int64_t>(s.queries, 1);
  }
  void take(int64_t first) {
    s.first = first;
    s.rows = std::min(piece(), s.queries - first);
    s.columns = s.causal != 0 ? std::min(s.keys, first + s.rows) : s.keys;
  }
  CUfunction kernel(const char* name) const {
    const int64_t held = (s.columns + grid().threads - 1) / grid().threads;
    const std::string more = concat(type_in_text(dtype), ", ", type_in_text(compute), ", ",
                                    type_in_text(mask.defined() ? mask.dtype() : DType::kBool), ", ",
                                    mask.defined() ? "true" : "false", ", ",
                                    held == 1   ? 1
                                    : held == 2 ? 2
                                    : held <= 4 ? 4
                                    : held <= 8 ? 8
                                                : 0);
    return instance(stream, kAttentionCu, name, {}, more.c_str());
  }
  Grid grid() const {
    return {.x = static_cast<unsigned>(std::clamp<int64_t>(s.heads * s.rows, 1, 1 << 22)),
            .threads = row_threads(std::min<int64_t>(s.columns, 256))};
  }
  void* mask_raw() const { return mask.defined() ? mask.raw() : nullptr; }
  Tensor empty(int64_t rows, int64_t columns) const {
    return Tensor::empty({s.heads, rows, columns}, dtype, stream.device);
  }

  Stream stream;
  DType dtype, compute;
  Tensor mask, q, k, v;
  int64_t repeats = 1;
  Scores s;
};

// A result of [heads, rows, columns] goes to where it belongs; what several heads share is summed.
void store_heads(const Tensor& from, const Tensor& to, int64_t repeats, Stream stream) {
  if (to.elems() == 0) return;
  Tensor whole = from;
  if (repeats > 1) {
    const int64_t rows = from.size(1), columns = from.size(2), heads = from.size(0) / repeats;
    whole = Tensor::empty({heads, rows, columns}, from.dtype(), from.device());
    sum_over(from.view_as({heads, repeats, rows * columns}, {repeats * rows * columns, rows * columns, 1}, 0), 1,
             whole.view_as({heads, rows * columns}, {rows * columns, 1}, 0), stream);
  }
  copy_into(whole.view_as(to.sizes(), contiguous_strides(to.sizes()), 0), to, stream);
}

}  // namespace

void attention(const KernelArgs& args) {
  if (cudnn_attention(args) || flash_attention(args)) return;
  AttentionCall call(args.in[0], args.in[1], args.in[2], args.in[3], args.in[4], args.attrs.get<AttentionAttrs>(),
                     args.stream);
  if (args.out[0].elems() == 0) return;
  const Tensor out = call.empty(call.s.queries, call.s.depth);
  for (int64_t first = 0; first < call.s.queries; first += call.piece()) {
    call.take(first);
    const Scores& s = call.s;
    const Tensor scores = Tensor::empty({s.heads, s.rows, s.columns}, call.compute, args.stream.device);
    const Tensor weights = call.empty(s.rows, s.columns);
    multiply(rows_of(call.q, first, s.rows), turned(rows_of(call.k, 0, s.columns)), scores, args.stream);
    launch(call.kernel("weights_of"), call.grid(), args.stream, scores.raw(), call.mask_raw(), weights.raw(),
           args.out[1].raw(), s);
    multiply(weights, rows_of(call.v, 0, s.columns), rows_of(out, first, s.rows), args.stream);
  }
  store_heads(out, args.out[0], 1, args.stream);
}

void attention_backward(const KernelArgs& args) {
  if (cudnn_attention_backward(args) || flash_attention_backward(args)) return;
  const Stream stream = args.stream;
  AttentionCall call(args.in[2], args.in[3], args.in[4], args.in[5], args.in[8], args.attrs.get<AttentionAttrs>(),
                     stream);
  const Scores& s = call.s;
  Tensor dout;
  if (args.in[0].defined()) {
    dout = as_heads(args.in[0], 1, stream);
  } else {
    dout = call.empty(s.queries, s.depth);
    set_zero(dout, stream);
  }
  const Tensor out = as_heads(args.in[6], 1, stream);
  const Tensor lse = contiguous(args.in[7], call.compute, stream);
  const Tensor dlse = args.in[1].defined() ? contiguous(args.in[1], call.compute, stream) : Tensor();
  void* const dlse_raw = dlse.defined() ? dlse.raw() : nullptr;
  // What several pieces add to is summed in the wide type.
  const bool in_pieces = call.piece() < s.queries;
  const DType summed = in_pieces ? call.compute : call.dtype;
  const Tensor dq = call.empty(s.queries, call.q.size(2));
  const Tensor dk = Tensor::empty({s.heads, s.keys, call.q.size(2)}, summed, stream.device);
  const Tensor dv = Tensor::empty({s.heads, s.keys, s.depth}, summed, stream.device);
  if (in_pieces || s.queries == 0) {
    set_zero(dk, stream);
    set_zero(dv, stream);
  }
  const double beta = in_pieces ? 1 : 0;
  for (int64_t first = 0; first < s.queries && args.out[0].elems() > 0; first += call.piece()) {
    call.take(first);
    const Tensor scores = Tensor::empty({s.heads, s.rows, s.columns}, call.compute, stream.device);
    const Tensor dweights = Tensor::empty(scores.sizes(), call.compute, stream.device);
    const Tensor weights = call.empty(s.rows, s.columns), dscores = call.empty(s.rows, s.columns);
    const Tensor q = rows_of(call.q, first, s.rows), k = rows_of(call.k, 0, s.columns),
                 v = rows_of(call.v, 0, s.columns);
    const Tensor g = rows_of(dout, first, s.rows);
    multiply(q, turned(k), scores, stream);
    multiply(g, turned(v), dweights, stream);
    if (scores.elems() > 0) {
      launch(call.kernel("weights_backward"), call.grid(), stream, scores.raw(), call.mask_raw(), dweights.raw(),
             out.raw(), dout.raw(), lse.raw(), dlse_raw, weights.raw(), dscores.raw(), s);
    }
    multiply(dscores, k, rows_of(dq, first, s.rows), stream);
    multiply(turned(dscores), q, rows_of(dk, 0, s.columns), stream, 1, beta);
    multiply(turned(weights), g, rows_of(dv, 0, s.columns), stream, 1, beta);
  }
  store_heads(dq, args.out[0], 1, stream);
  store_heads(dk, args.out[1], call.repeats, stream);
  store_heads(dv, args.out[2], call.repeats, stream);
}

void attention_backward_joined(const KernelArgs& args) {
  std::array<Tensor, 3> parts = joined_heads(args.out[0]);
  attention_backward({args.in, parts, args.attrs, args.stream});
}

}  // namespace chorale::kernel::cuda
