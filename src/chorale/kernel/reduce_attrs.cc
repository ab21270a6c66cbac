#include "chorale/kernel/reduce_attrs.h"

namespace chorale::kernel {

DimMask dim_mask(const char* op, const IntList& dims, int64_t of) {
  if (dims.empty()) return (DimMask{1} << of) - 1;
  DimMask mask = 0;
  for (int64_t dim : dims) {
    const DimMask bit = DimMask{1} << normalize_dim(op, dim, of);
    CHORALE_CHECK(!(mask & bit), "[", op, "] dimension ", dim, " is named twice in ", dims.shape());
    mask |= bit;
  }
  return mask;
}

Shape reduced_shape(const Shape& sizes, DimMask reduced, bool keepdim) {
  Shape result;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!(reduced >> d & 1u)) {
      result.push_back(sizes[d]);
    } else if (keepdim) {
      result.push_back(1);
    }
  }
  return result;
}

int64_t reduced_count(const Shape& sizes, DimMask reduced) {
  int64_t count = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (reduced >> d & 1u) count *= sizes[d];
  }
  return count;
}

}  // namespace chorale::kernel
