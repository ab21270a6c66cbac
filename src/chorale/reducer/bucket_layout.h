// Where gradients lie: in which bucket, and where in memory.
#pragma once

#include <cstdint>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/tensor/tensor.h"

namespace chorale::reducer {

using BucketLayout = std::vector<std::vector<size_t>>;  // by bucket, the gradients in it

// What rank 0 has; there are `gradients` of them in all. Collective.
BucketLayout layout_of_rank_0(const comm::Group& group, const BucketLayout& own, size_t gradients);

// Note [Arenas] All buckets of a dtype and device lie in one tensor. When they are made anew, and no gradient lies in
// the old ones (the usual zero_grad() before a forward drops them), they are only cut otherwise: gradients never exist
// twice.
class BucketArenas {
 public:
  // A gradient that will lie in some bucket of this dtype and device: there is room for any way of cutting.
  void add_room(DType dtype, Device device, int64_t elems);
  // Forgets all cuts, and with `anew` the memory too.
  void start_over(bool anew);
  struct Stretch {
    Tensor arena;
    int64_t offset = 0;
  };
  // Memory of a further bucket; it begins at a cache line.
  Stretch cut(DType dtype, Device device, int64_t elems);

 private:
  struct Arena {
    DType dtype = DType::kF32;
    Device device{};
    int64_t room = 0, used = 0;
    Tensor memory{};
  };
  Arena& of(DType dtype, Device device);

  std::vector<Arena> arenas_;
};

}  // namespace chorale::reducer
