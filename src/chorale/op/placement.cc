#include "chorale/op/placement.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale::op {

Partial Partial::norm(double p) {
  if (std::isinf(p)) return p > 0 ? Reduce::kMax : Reduce::kMin;
  // The "norm" with p = 0 counts elements that are not 0.
  return p == 0 ? Partial(Reduce::kSum) : Partial(Reduce::kSum, p);
}

std::ostream& operator<<(std::ostream& out, const Partial& partial) {
  switch (partial.reduce) {
    case Reduce::kNone:
      return out << "none";
    case Reduce::kSum:
      return partial.power == 1 ? out << "sum" : out << "norm " << partial.power;
    case Reduce::kProduct:
      return out << "product";
    case Reduce::kMin:
      return out << "min";
    case Reduce::kMax:
      return out << "max";
    case Reduce::kAverage:
      return out << "avg";
    case Reduce::kBitAnd:
      return out << "and";
    case Reduce::kBitOr:
      return out << "or";
    case Reduce::kBitXor:
      return out << "xor";
  }
  return out;
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  if (placement.is_shard()) return out << "S(" << placement.dim() << ")";
  return placement.is_partial() ? out << "P(" << placement.partial() << ")" : out << "R";
}

Chunk chunk_of(int64_t size, int64_t shards, int64_t shard) {
  CHORALE_CHECK(shards > 0 && shard >= 0 && shard < shards, "[chunk_of] there is no shard ", shard, " of ", shards);
  const int64_t length = (size + shards - 1) / shards;
  const int64_t first = std::min(size, shard * length);
  return {first, std::min(size, first + length) - first};
}

Part part_of(const Shape& whole, const Placement& placement, int64_t shards, int64_t shard) {
  Part part{whole, Shape(whole.size(), 0)};
  if (!placement.is_shard()) return part;
  const auto dim = static_cast<size_t>(placement.dim());
  CHORALE_CHECK(dim < whole.size(), "[part_of] ", placement, " of a tensor of shape ", whole);
  const Chunk chunk = chunk_of(whole[dim], shards, shard);
  part.sizes[dim] = chunk.size;
  part.first[dim] = chunk.first;
  return part;
}

}  // namespace chorale::op
