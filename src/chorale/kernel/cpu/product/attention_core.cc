#include "chorale/kernel/cpu/product/attention_core.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "chorale/kernel/cpu/support/scratch.h"
#include "chorale/vec/highway_targets.h"
#include "chorale/vec/loops.h"
#include "chorale/vec/random.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chorale/kernel/cpu/product/attention_core.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "chorale/kernel/cpu/product/tile_product-inl.h"
#include "chorale/vec/math-inl.h"

#ifndef CHORALE_KERNEL_CPU_ATTENTION_CORE_ONCE
#define CHORALE_KERNEL_CPU_ATTENTION_CORE_ONCE
namespace chorale::kernel::cpu {

// A block of scores is kQueryBlock x kKeyBlock; with it, the blocks of the operands that make it stay in the L2 cache.
inline constexpr int64_t kQueryBlock = 64;
inline constexpr int64_t kKeyBlock = 64;

inline int64_t padded(int64_t n) { return (n + kAttentionPad - 1) / kAttentionPad * kAttentionPad; }

// One allocation, handed out in aligned pieces.
template <class T>
class Pieces {
 public:
  explicit Pieces(int64_t elems) : memory_(static_cast<size_t>(elems) * sizeof(T)), next_(memory_.as<T>()) {}
  T* take(int64_t elems) { return std::exchange(next_, next_ + padded(elems)); }

 private:
  Scratch memory_;
  T* next_;
};

// to[c][i] = rows[i][c] for i < count, zero up to the padded count; rows of `to` have kKeyBlock elements.
template <class T>
void transpose_block(RowsOf<const T> rows, int64_t first, int64_t count, int64_t columns, T* to) {
  vec::transpose_copy(rows.row(first), rows.stride * static_cast<int64_t>(sizeof(T)), to,
                      kKeyBlock * static_cast<int64_t>(sizeof(T)), count, columns, sizeof(T));
  if (count == padded(count)) return;
  for (int64_t c = 0; c < columns; ++c) std::fill(to + c * kKeyBlock + count, to + c * kKeyBlock + padded(count), T(0));
}

// Keys first … first + count that query i sees.
template <class T>
int64_t visible(const AttentionHead<T>& head, int64_t query, int64_t first, int64_t count) {
  return head.causal ? std::clamp<int64_t>(query + 1 - first, 0, count) : count;
}

// scores = scores * scale + mask, or -inf where a bool mask says no.
template <class T>
void add_mask(const AttentionHead<T>& head, int64_t query, int64_t rows, int64_t key, int64_t columns, T* scores) {
  const AttentionMask& mask = head.mask;
  visit_dtype(mask.dtype, [&](auto tag) {
    using M = typename decltype(tag)::type;
    if constexpr (std::is_same_v<M, bool> || is_floating(dtype_of<M>)) {
      for (int64_t r = 0; r < rows; ++r) {
        const M* m = static_cast<const M*>(mask.data) + (query + r) * mask.query_stride + key * mask.key_stride;
        T* s = scores + r * kKeyBlock;
        for (int64_t c = 0; c < columns; ++c) {
          if constexpr (std::is_same_v<M, bool>) {
            s[c] = m[c * mask.key_stride] ? s[c] * head.scale : -std::numeric_limits<T>::infinity();
          } else if constexpr (std::is_same_v<M, double>) {
            s[c] = s[c] * head.scale + static_cast<T>(m[c * mask.key_stride]);
          } else {
            s[c] = s[c] * head.scale + static_cast<T>(static_cast<float>(m[c * mask.key_stride]));
          }
        }
      }
    }
  });
}

// What weights (query, key) … (query, key + columns) are multiplied by: 0 or keep_scale.
template <class T>
void dropout_factors(const AttentionHead<T>& head, int64_t query, int64_t key, int64_t columns, T* factors) {
  uint32_t words[kKeyBlock];
  const AttentionDropout& dropout = head.dropout;
  vec::random_words(dropout.stream, dropout.first_word + static_cast<uint64_t>(query * head.keys + key), words,
                    columns);
  const T keep = static_cast<T>(dropout.keep_scale);
  for (int64_t c = 0; c < columns; ++c) factors[c] = words[c] < dropout.threshold ? T(0) : keep;
}

}  // namespace chorale::kernel::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace chorale::kernel::cpu::HWY_NAMESPACE {
using chorale::vec::HWY_NAMESPACE::vexp;
using chorale::vec::HWY_NAMESPACE::vlog;

template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();

// The largest of the first `count` elements times scale; the row is padded.
template <class T>
HWY_INLINE T row_max(const T* row, int64_t count, T scale) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, scale);
  auto largest = hn::Set(d, -kInf<T>);
  int64_t c = 0;
  for (; c + lanes <= count; c += lanes) largest = hn::Max(largest, hn::Mul(hn::LoadU(d, row + c), factor));
  if (c < count) {
    const auto mask = hn::FirstN(d, static_cast<size_t>(count - c));
    largest = hn::Max(largest, hn::IfThenElse(mask, hn::Mul(hn::LoadU(d, row + c), factor), hn::Set(d, -kInf<T>)));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// row = exp(row * scale - shift) for the first `count`, 0 up to `width`; returns the sum.
template <class T>
HWY_INLINE T row_exp(T* row, int64_t count, int64_t width, T scale, T shift) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, scale), minus = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  int64_t c = 0;
  for (; c + lanes <= count; c += lanes) {
    const auto e = vexp(hn::MulSub(hn::LoadU(d, row + c), factor, minus));
    sum = hn::Add(sum, e);
    hn::StoreU(e, d, row + c);
  }
  if (c < count) {
    const auto mask = hn::FirstN(d, static_cast<size_t>(count - c));
    const auto e = hn::IfThenElseZero(mask, vexp(hn::MulSub(hn::LoadU(d, row + c), factor, minus)));
    sum = hn::Add(sum, e);
    hn::StoreU(e, d, row + c);
    c += lanes;
  }
  for (; c < width; c += lanes) hn::StoreU(hn::Zero(d), d, row + c);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// ds = p * (ds - delta) * scale over whole vectors.
template <class T>
HWY_INLINE void row_gradient(const T* p, T* ds, int64_t width, T delta, T scale) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto minus = hn::Set(d, delta), factor = hn::Set(d, scale);
  for (int64_t c = 0; c < width; c += lanes) {
    const auto weight = hn::Mul(hn::LoadU(d, p + c), factor);
    hn::StoreU(hn::Mul(weight, hn::Sub(hn::LoadU(d, ds + c), minus)), d, ds + c);
  }
}

// The running maximum, sum of exponentials and correction of what was added up before, of a block of queries; padded.
template <class T>
struct Running {
  T* max;
  T* sum;
  T* correction;
};

// Turns a block of scores into weights exp(score - new maximum) and brings the running values up to date.
template <class T>
HWY_INLINE void online_softmax(const AttentionHead<T>& head, int64_t query, int64_t rows, int64_t key, int64_t columns,
                               T* scores, const Running<T>& running) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T scale = head.mask.data ? T(1) : head.scale;
  HWY_ALIGN T largest[kQueryBlock];
  for (int64_t r = 0; r < rows; ++r) {
    largest[r] = row_max(scores + r * kKeyBlock, visible(head, query + r, key, columns), scale);
  }
  for (int64_t r = rows; r < padded(rows); ++r) largest[r] = T(0);
  for (int64_t r = 0; r < rows; r += lanes) {
    const auto before = hn::LoadU(d, running.max + r);
    const auto now = hn::Max(before, hn::LoadU(d, largest + r));
    // As long as no key takes part, exponents are taken from 0: the weights are 0, and so is everything before.
    const auto shift = hn::IfThenElse(hn::Eq(now, hn::Set(d, -kInf<T>)), hn::Zero(d), now);
    const auto correction = vexp(hn::Sub(before, shift));
    hn::StoreU(now, d, running.max + r);
    hn::StoreU(shift, d, largest + r);
    hn::StoreU(correction, d, running.correction + r);
    hn::StoreU(hn::Mul(hn::LoadU(d, running.sum + r), correction), d, running.sum + r);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t count = visible(head, query + r, key, columns);
    running.sum[r] += row_exp(scores + r * kKeyBlock, count, padded(columns), scale, largest[r]);
  }
}

template <class T>
void forward(const AttentionHead<T>& head, int64_t first, int64_t count, RowsOf<T> out, T* lse) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = padded(head.value_depth);
  Pieces<T> memory(kQueryBlock * kKeyBlock + head.depth * kKeyBlock + count * width + 3 * padded(count));
  T* scores = memory.take(kQueryBlock * kKeyBlock);
  T* keys = memory.take(head.depth * kKeyBlock);
  T* sums = memory.take(count * width);
  T* max = memory.take(count);
  T* sum = memory.take(count);
  T* correction = memory.take(count);
  std::fill(sums, sums + count * width, T(0));
  std::fill(max, max + padded(count), -kInf<T>);
  std::fill(sum, sum + padded(count), T(0));

  const int64_t last_key = head.causal ? std::min(head.keys, first + count) : head.keys;
  for (int64_t key = 0; key < last_key; key += kKeyBlock) {
    transpose_block(head.k, key, std::min(kKeyBlock, head.keys - key), head.depth, keys);
    // Queries before the key see nothing of this block.
    const int64_t begin = head.causal && key > first ? (key - first) / kQueryBlock * kQueryBlock : 0;
    for (int64_t i = begin; i < count; i += kQueryBlock) {
      const int64_t query = first + i, rows = std::min(kQueryBlock, count - i);
      const int64_t columns = visible(head, query + rows - 1, key, std::min(kKeyBlock, head.keys - key));
      tile_product<Start::kZero>(TileProduct<T>{rows, padded(columns), head.depth, head.q.row(query), head.q.stride, 1,
                                                keys, kKeyBlock, scores, kKeyBlock});
      if (head.mask.data) add_mask(head, query, rows, key, columns, scores);
      online_softmax(head, query, rows, key, columns, scores, Running<T>{max + i, sum + i, correction + i});
      if (head.dropout.threshold > 0) {
        T factors[kKeyBlock];
        for (int64_t r = 0; r < rows; ++r) {
          dropout_factors(head, query + r, key, columns, factors);
          for (int64_t c = 0; c < columns; ++c) scores[r * kKeyBlock + c] *= factors[c];
        }
      }
      tile_product<Start::kScaleAdd>(TileProduct<T>{rows, width, columns, scores, kKeyBlock, 1, head.v.row(key),
                                                    head.v.stride, sums + i * width, width, correction + i});
    }
  }

  for (int64_t i = 0; i < count; i += lanes) {
    const auto total = hn::LoadU(d, sum + i);
    const auto none = hn::Eq(total, hn::Zero(d));
    const auto logarithm = hn::Add(hn::LoadU(d, max + i), vlog(total));
    hn::StoreU(hn::IfThenElse(none, hn::Set(d, -kInf<T>), logarithm), d, max + i);
    hn::StoreU(hn::IfThenZeroElse(none, hn::Div(hn::Set(d, T(1)), total)), d, sum + i);
  }
  std::copy(max, max + count, lse);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < head.value_depth; ++c) out.row(i)[c] = sums[i * width + c] * sum[i];
  }
}

template <class T>
void backward(const AttentionHead<T>& head, const AttentionBackward<T>& b) {
  const int64_t width = padded(head.depth), value_width = padded(head.value_depth);
  Pieces<T> memory((2 * kQueryBlock + head.depth + head.value_depth) * kKeyBlock + 2 * padded(head.queries));
  T* weights = memory.take(kQueryBlock * kKeyBlock);
  T* dscores = memory.take(kQueryBlock * kKeyBlock);
  T* keys = memory.take(head.depth * kKeyBlock);
  T* values = memory.take(head.value_depth * kKeyBlock);
  T* delta = memory.take(head.queries);
  T* shift = memory.take(head.queries);
  const auto dot = vec::dot(dtype_of<T>);
  for (int64_t i = 0; i < head.queries; ++i) {
    // A row of softmax's gradient, p (dp - sum(p dp)), needs sum(p dp) = dout . out; logsumexp's own is p dlse.
    dot(b.dout.row(i), b.out.row(i), head.value_depth, delta + i);
    if (b.dlse) delta[i] -= b.dlse[i];
    shift[i] = b.lse[i] == -kInf<T> ? kInf<T> : b.lse[i];
  }

  const T scale = head.mask.data ? T(1) : head.scale;
  for (int64_t key = 0; key < head.keys; key += kKeyBlock) {
    const int64_t in_block = std::min(kKeyBlock, head.keys - key);
    transpose_block(head.k, key, in_block, head.depth, keys);
    transpose_block(head.v, key, in_block, head.value_depth, values);
    const int64_t begin = head.causal ? key / kQueryBlock * kQueryBlock : 0;
    for (int64_t query = begin; query < head.queries; query += kQueryBlock) {
      const int64_t rows = std::min(kQueryBlock, head.queries - query);
      const int64_t columns = visible(head, query + rows - 1, key, in_block);
      tile_product<Start::kZero>(TileProduct<T>{rows, padded(columns), head.depth, head.q.row(query), head.q.stride, 1,
                                                keys, kKeyBlock, weights, kKeyBlock});
      tile_product<Start::kZero>(TileProduct<T>{rows, padded(columns), head.value_depth, b.dout.row(query),
                                                b.dout.stride, 1, values, kKeyBlock, dscores, kKeyBlock});
      if (head.mask.data) add_mask(head, query, rows, key, columns, weights);
      for (int64_t r = 0; r < rows; ++r) {
        T* p = weights + r * kKeyBlock;
        T* ds = dscores + r * kKeyBlock;
        row_exp(p, visible(head, query + r, key, columns), padded(columns), scale, shift[query + r]);
        if (head.dropout.threshold == 0) {
          row_gradient(p, ds, padded(columns), delta[query + r], head.scale);
        } else {
          T factors[kKeyBlock];
          dropout_factors(head, query + r, key, columns, factors);
          for (int64_t c = 0; c < columns; ++c) ds[c] *= factors[c];
          row_gradient(p, ds, padded(columns), delta[query + r], head.scale);
          for (int64_t c = 0; c < columns; ++c) p[c] *= factors[c];
        }
      }
      tile_product<Start::kAdd>(TileProduct<T>{columns, value_width, rows, weights, 1, kKeyBlock, b.dout.row(query),
                                               b.dout.stride, b.dv.row(key), b.dv.stride});
      tile_product<Start::kAdd>(TileProduct<T>{columns, width, rows, dscores, 1, kKeyBlock, head.q.row(query),
                                               head.q.stride, b.dk.row(key), b.dk.stride});
      tile_product<Start::kAdd>(TileProduct<T>{rows, width, columns, dscores, kKeyBlock, 1, head.k.row(key),
                                               head.k.stride, b.dq.row(query), b.dq.stride});
    }
  }
}

void forward_f32(const AttentionHead<float>& head, int64_t first, int64_t count, RowsOf<float> out, float* lse) {
  forward(head, first, count, out, lse);
}
void forward_f64(const AttentionHead<double>& head, int64_t first, int64_t count, RowsOf<double> out, double* lse) {
  forward(head, first, count, out, lse);
}
void backward_f32(const AttentionHead<float>& head, const AttentionBackward<float>& b) { backward(head, b); }
void backward_f64(const AttentionHead<double>& head, const AttentionBackward<double>& b) { backward(head, b); }

}  // namespace chorale::kernel::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chorale::kernel::cpu {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_f64);
HWY_EXPORT(backward_f32);
HWY_EXPORT(backward_f64);

void attention_forward(const AttentionHead<float>& head, int64_t first, int64_t count, RowsOf<float> out, float* lse) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(head, first, count, out, lse);
}
void attention_forward(const AttentionHead<double>& head, int64_t first, int64_t count, RowsOf<double> out,
                       double* lse) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(head, first, count, out, lse);
}
void attention_backward(const AttentionHead<float>& head, const AttentionBackward<float>& b) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(head, b);
}
void attention_backward(const AttentionHead<double>& head, const AttentionBackward<double>& b) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(head, b);
}

}  // namespace chorale::kernel::cpu
#endif
