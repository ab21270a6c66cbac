// Tensors whose values say where they stand, and chunks of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "chorale/api/api.h"
#include "chorale/snapshot/snapshot.h"

namespace chorale::snapshot {

// Values that say where they stand.
inline Tensor numbered(const Shape& sizes, double first = 0) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return add(reshape(arange(0, n, 1, DType::kF32), IntList(sizes)), first);
}

// The chunk of a dimension that a rank has: ceil(n / ranks) each, the last ones short or empty.
inline Region shard(const Shape& whole, size_t dim, int64_t ranks, int64_t rank) {
  Region region = whole_of(whole);
  const int64_t size = (whole[dim] + ranks - 1) / ranks, begin = std::min(rank * size, whole[dim]);
  region.offsets[dim] = begin;
  region.sizes[dim] = std::min(size, whole[dim] - begin);
  return region;
}

inline TensorChunk chunk_of(const std::string& key, const Tensor& whole, const Region& region) {
  return {key, whole.sizes(), region.offsets, clone(part_of(whole, whole_of(whole.sizes()), region))};
}
inline TensorChunk empty_chunk(const std::string& key, const Shape& whole, const Region& region) {
  return {key, whole, region.offsets, full(region.sizes, -1)};
}
inline void expect_part(const TensorChunk& chunk, const Tensor& whole) {
  const Tensor expected = part_of(whole, whole_of(whole.sizes()), chunk.region());
  EXPECT_EQ(chunk.local.to_vector<float>(), expected.to_vector<float>()) << chunk.key << " at " << chunk.region();
}

}  // namespace chorale::snapshot
