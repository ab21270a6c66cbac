// Attributes of collectives as ops.
#pragma once

#include "chorale/base/reduce.h"
#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

enum class Collective : uint8_t { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kReduce, kAllToAll };

// Sizes follow from them alone: how many ranks there are, which one this is, and how long what is cut into chunks is as
// a whole (chunks as of op::chunk_of, so the last may be short or empty).
struct CollectiveAttrs {
  Collective kind = Collective::kAllReduce;
  Reduce reduce = Reduce::kSum;
  int64_t ranks = 1;
  int64_t rank = 0;
  int64_t dim = 0;    // that is put together or cut into chunks; of an all-to-all: cut
  int64_t whole = 0;  // the size of the dimension that is put together
  int64_t other = 0;  // of an all-to-all: the dimension that is put together
  int64_t root = 0;   // a global rank
  double factor = 1;  // of an all-reduce that adds: what each rank multiplies its own with before
};
CHORALE_FIELDS(CollectiveAttrs, kind, reduce, ranks, rank, dim, whole, other, root, factor)

struct MessageAttrs {
  int64_t peer = 0;  // a global rank
  int64_t tag = 0;
  IntList sizes;  // of what is received
  DType dtype = DType::kF32;
};
CHORALE_FIELDS(MessageAttrs, peer, tag, sizes, dtype)

}  // namespace chorale::kernel
