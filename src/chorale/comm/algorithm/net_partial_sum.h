// Inside comm: what the reductions between hosts share.
//
// Where sums by host follow the tree, a host's values are summed first, and partial sums travel: as f32 where the
// values are f16 or bf16, because such sums are rounded once, at the end. An average is a sum until the last step, and
// a factor is applied in the first.
#pragma once

#include <span>
#include <vector>

#include "chorale/comm/algorithm/slice.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

Chunk chunk_of(const Tensor& tensor);
Chunk part(const Chunk& whole, int64_t begin, int64_t end, size_t elem);
Chunk part(const Chunk& whole, const Slice& slice, size_t elem);

// Pieces of what travels: one is summed while the next ones are on their way. There is at least one, even if it is
// empty, so that hosts hear from each other.
std::vector<Slice> pieces_of(const Slice& slice, size_t elem);

// The values of this rank on their way to the sum: the caller's own memory, or a copy in which partial sums fit.
class PartialSum {
 public:
  // Sums in the caller's memory unless `own` asks for a copy.
  PartialSum(NetCall& call, const Chunk& data, bool own = false);

  DType dtype() const { return dtype_; }
  size_t elem() const { return size_of(dtype_); }
  int64_t elems() const { return elems_; }
  const Chunk& values() const { return values_; }
  // False when every host has one value, which travels as it is.
  bool has_first_step() const { return !leaves_; }
  Reduction first_step() const;
  // Sums the values of all hosts, element by element. `to` holds elements of the call's dtype, and may be one of them.
  void last_step(std::span<const void* const> hosts, const Chunk& to, int64_t elems) const;

 private:
  const NetCall& call_;
  const size_t size_;
  const int64_t elems_;
  bool leaves_ = true;
  DType dtype_ = DType::kU8;
  Chunk values_;
};

// What every rank gives to this one, in the order of ranks; `own` is used where it is.
class Leaves {
 public:
  Leaves(NetCall& call, const Chunk& own);
  Chunk of(int rank) const {
    return {static_cast<std::byte*>(const_cast<void*>(sources_[static_cast<size_t>(rank)])), bytes_};
  }
  const std::vector<const void*>& all() const { return sources_; }

 private:
  std::vector<const void*> sources_;
  size_t bytes_ = 0;
};
void combine_leaves(const NetCall& call, const std::vector<const void*>& leaves, const Chunk& to);

}  // namespace chorale::comm
