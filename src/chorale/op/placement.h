// Where the elements of a tensor are, over the ranks of one dimension of a mesh: every rank has all of them, or a chunk
// of one dimension, or a part of every value.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "chorale/base/reduce.h"
#include "chorale/tensor/shape.h"

namespace chorale::op {

// How values that are spread over ranks become one. kNone: they are not spread.
struct Partial {
  Reduce reduce = Reduce::kNone;
  // With kSum, the exponent of norms: the values are raised to it, added up, and the root is taken.
  double power = 1;

  constexpr Partial() = default;
  constexpr Partial(Reduce kind, double p = 1) : reduce(kind), power(p) {}  // NOLINT(google-explicit-constructor)
  // The p-norms of parts, of which the whole p-norm can be made.
  static Partial norm(double p);

  constexpr bool none() const { return reduce == Reduce::kNone; }
  friend constexpr bool operator==(const Partial&, const Partial&) = default;
};

class Placement {
 public:
  constexpr Placement() = default;  // replicated: every rank has the whole
  static constexpr Placement shard(int64_t dim) {
    Placement placement;
    placement.dim_ = static_cast<int8_t>(dim);
    return placement;
  }
  static constexpr Placement partial(Partial partial) {
    Placement placement;
    placement.partial_ = partial;
    return placement;
  }

  constexpr bool is_shard() const { return dim_ >= 0; }
  constexpr bool is_partial() const { return !partial_.none(); }
  constexpr bool is_replicate() const { return !is_shard() && !is_partial(); }
  constexpr int64_t dim() const { return dim_; }                 // of a shard
  constexpr const Partial& partial() const { return partial_; }  // of a partial value
  friend constexpr bool operator==(const Placement&, const Placement&) = default;

 private:
  int8_t dim_ = -1;
  Partial partial_;
};

// R, S(0), P(sum), P(norm 2)
std::ostream& operator<<(std::ostream& out, const Partial& partial);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

// The part of a dimension that a shard has. Shards are as long as ceil(size / shards) allows; the last ones may be
// shorter, or empty (they then begin at the end): 5 over 4 gives 2, 2, 1, 0.
struct Chunk {
  int64_t first = 0, size = 0;
};
Chunk chunk_of(int64_t size, int64_t shards, int64_t shard);

// What a rank has of a tensor: how much, and where that begins in the whole.
struct Part {
  Shape sizes, first;
};
// The part of a tensor with this placement that is on one shard. Partial and replicated tensors have their whole shape
// everywhere.
Part part_of(const Shape& whole, const Placement& placement, int64_t shards, int64_t shard);

}  // namespace chorale::op
