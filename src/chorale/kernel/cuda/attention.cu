// Attention between its products: scores become weights, and the gradients of weights those of scores. A block works on
// the scores of one query; scores are in C, what is multiplied in T.
struct Scores {
  i64 heads, queries, keys, depth;  // depth: of values
  i64 first, rows, columns;         // the scores at hand: of queries [first, first + rows) for keys [0, columns)
  i64 causal, lead_dims;
  i64 lead_sizes[8], mask_strides[8];  // of the dimensions before queries and keys
  i64 mask_query, mask_key;
  double scale, keep_scale;
  u32 threshold;  // of dropout; 0: none is dropped
  u32 drops;
  Drawn drawn;
};
template <class M>
__device__ __forceinline__ const M* mask_row(const M* mask, const Scores& s, i64 row) {
  i64 head = row / s.queries, at = row % s.queries * s.mask_query;
  for (int d = (int)s.lead_dims - 1; d >= 0; --d) {
    at += head % s.lead_sizes[d] * s.mask_strides[d];
    head /= s.lead_sizes[d];
  }
  return mask + at;
}
// The score of key j, scaled and masked.
template <class C, class M, bool kMasked>
__device__ __forceinline__ C score_at(const C* scores, const M* mask, const Scores& s, i64 query, i64 j) {
  const C infinite = C(1) / C(0);
  if (s.causal && j > query) return -infinite;
  const C score = scores[j] * (C)s.scale;
  if constexpr (!kMasked) {
    return score;
  } else if constexpr (IsSame<M, bool>::value) {
    return mask[j * s.mask_key] ? score : -infinite;
  } else {
    return score + (C)widen(mask[j * s.mask_key]);
  }
}
template <class C>
__device__ __forceinline__ C dropout_factor(const Scores& s, i64 row, i64 j) {
  if (!s.drops) return C(1);
  const i64 base = whole_index(s.drawn, row / s.queries * s.queries * s.keys);
  const u32 word = word_of(s.drawn, (u64)(base + row % s.queries * s.keys + j));
  return word < s.threshold ? C(0) : (C)s.keep_scale;
}

// Scores of a row stay in registers where there are at most kHeld for each thread; 0: they are read again and again.
template <class T, class C, class M, bool kMasked, int kHeld>
__global__ void weights_of(const C* scores, const M* mask, T* weights, C* lse, const Scores s) {
  const C infinite = C(1) / C(0);
  for (i64 at = blockIdx.x; at < s.heads * s.rows; at += gridDim.x) {
    const i64 query = s.first + at % s.rows, row = at / s.rows * s.queries + query;
    const C* const from = scores + at * s.columns;
    T* const to = weights + at * s.columns;
    const M* const allowed = kMasked ? mask_row(mask, s, row) : mask;
    C held[kHeld > 0 ? kHeld : 1];
    C most = -infinite;
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const i64 j = threadIdx.x + (i64)k * blockDim.x;
        held[k] = j < s.columns ? score_at<C, M, kMasked>(from, allowed, s, query, j) : -infinite;
        most = Larger::of(most, held[k]);
      }
    } else {
      for (i64 j = threadIdx.x; j < s.columns; j += blockDim.x)
        most = Larger::of(most, score_at<C, M, kMasked>(from, allowed, s, query, j));
    }
    most = over_block<Larger>(most, -infinite);
    C sum = 0;
    if (most != -infinite) {
      if constexpr (kHeld > 0) {
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
          held[k] = ::exp(held[k] - most);
          sum += held[k];
        }
      } else {
        for (i64 j = threadIdx.x; j < s.columns; j += blockDim.x)
          sum += ::exp(score_at<C, M, kMasked>(from, allowed, s, query, j) - most);
      }
    }
    sum = over_block<Plus>(sum, C(0));
    const C scale = most == -infinite ? C(0) : C(1) / sum;
    if (threadIdx.x == 0) lse[row] = most == -infinite ? -infinite : most + ::log(sum);
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const i64 j = threadIdx.x + (i64)k * blockDim.x;
        const C weight = most == -infinite ? C(0) : held[k] * scale;
        if (j < s.columns) to[j] = cast<T>(weight * dropout_factor<C>(s, row, j));
      }
    } else {
      for (i64 j = threadIdx.x; j < s.columns; j += blockDim.x) {
        const C weight =
            most == -infinite ? C(0) : ::exp(score_at<C, M, kMasked>(from, allowed, s, query, j) - most) * scale;
        to[j] = cast<T>(weight * dropout_factor<C>(s, row, j));
      }
    }
  }
}
template <class T, class C, class M, bool kMasked, int kHeld>
__global__ void weights_backward(const C* scores, const M* mask, const C* dweights, const T* out, const T* dout,
                                 const C* lse, const C* dlse, T* weights, T* dscores, const Scores s) {
  const C infinite = C(1) / C(0);
  for (i64 at = blockIdx.x; at < s.heads * s.rows; at += gridDim.x) {
    const i64 query = s.first + at % s.rows, row = at / s.rows * s.queries + query;
    const C* const from = scores + at * s.columns;
    const M* const allowed = kMasked ? mask_row(mask, s, row) : mask;
    C dot = 0;
    for (i64 d = threadIdx.x; d < s.depth; d += blockDim.x)
      dot += (C)widen(out[row * s.depth + d]) * (C)widen(dout[row * s.depth + d]);
    dot = over_block<Plus>(dot, C(0));
    if (dlse) dot -= dlse[row];
    const C whole = lse[row];
    for (i64 j = threadIdx.x; j < s.columns; j += blockDim.x) {
      const C weight = whole == -infinite ? C(0) : ::exp(score_at<C, M, kMasked>(from, allowed, s, query, j) - whole);
      const C factor = dropout_factor<C>(s, row, j);
      weights[at * s.columns + j] = cast<T>(weight * factor);
      dscores[at * s.columns + j] = cast<T>(weight * (factor * dweights[at * s.columns + j] - dot) * (C)s.scale);
    }
  }
}
