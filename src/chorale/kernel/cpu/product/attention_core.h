// Attention of one head on plain memory, tiled so that memory beyond the operands does not grow with the square of the
// length: softmax(scale Q K^T + mask) V with the softmax computed block of keys by block of keys (Milakov and
// Gimelshein, "Online normalizer calculation for softmax"; Dao et al., "FlashAttention"). One thread.
#pragma once

#include <cstdint>

#include "chorale/base/dtype.h"
#include "chorale/base/philox.h"

namespace chorale::kernel::cpu {

// Columns of matrices that are read as whole vectors are padded to a multiple of this with finite numbers.
inline constexpr int64_t kAttentionPad = 16;

// A matrix whose rows are contiguous.
template <class T>
struct RowsOf {
  T* data = nullptr;
  int64_t stride = 0;

  T* row(int64_t i) const { return data + i * stride; }
};

// A tensor added to the scores, or a bool one that says which of them take part.
struct AttentionMask {
  const void* data = nullptr;  // none
  DType dtype = DType::kBool;
  int64_t query_stride = 0, key_stride = 0;
};

struct AttentionDropout {
  uint32_t threshold = 0;  // a weight is dropped where its random word is below; 0: none is
  double keep_scale = 1;   // what the others are multiplied by
  RandomStream stream;
  uint64_t first_word = 0;  // of this head's weight (0, 0); weight (i, j) has the word i * keys + j places further
};

// T is f32 or f64. q and k have `depth` columns, v has `value_depth`.
template <class T>
struct AttentionHead {
  int64_t queries, keys, depth, value_depth;
  RowsOf<const T> q, k, v;  // padded: v; in backward also q and k
  T scale;
  bool causal;  // query i sees keys 0 … i
  AttentionMask mask;
  AttentionDropout dropout;
};

// Rows `first` … `first + count` of the result, and the logarithms of their sums of exponentials: -inf where no key
// takes part; the row of the result is then 0. out's rows need no padding.
void attention_forward(const AttentionHead<float>& head, int64_t first, int64_t count, RowsOf<float> out, float* lse);
void attention_forward(const AttentionHead<double>& head, int64_t first, int64_t count, RowsOf<double> out,
                       double* lse);

// Adds the gradients of q, k and v to dq, dk and dv. All rows but those of `out` are padded.
template <class T>
struct AttentionBackward {
  RowsOf<const T> out, dout;
  const T* lse;
  const T* dlse;  // its gradient; may be null
  RowsOf<T> dq, dk, dv;
};
void attention_backward(const AttentionHead<float>& head, const AttentionBackward<float>& backward);
void attention_backward(const AttentionHead<double>& head, const AttentionBackward<double>& backward);

}  // namespace chorale::kernel::cpu
