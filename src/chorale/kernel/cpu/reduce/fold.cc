#include "chorale/kernel/cpu/reduce/fold.h"

#include "chorale/base/error.h"

namespace chorale::kernel::cpu {

VecFold::VecFold(vec::ReduceOp op, DType in_dtype, DType out_dtype)
    : Fold(in_dtype, out_dtype, size_of(vec::accumulator_of(op, in_dtype))),
      acc_dtype_(vec::accumulator_of(op, in_dtype)),
      op_(op),
      row_(vec::reduce_row(op, in_dtype)),
      columns_(vec::reduce_columns(op, in_dtype)),
      combine_(vec::reduce_combine(op, in_dtype)),
      convert_(vec::convert_loop(acc_dtype_, out_dtype)) {
  CHORALE_INVARIANT(row_ && columns_ && combine_, "no loop for this reduction of ", in_dtype);
}

void VecFold::identity(void* acc, int64_t n) const {
  alignas(16) std::byte one[kMaxAccBytes];
  vec::reduce_identity(op_, in, one);
  vec::fill(acc, one, acc_bytes, n);
}

}  // namespace chorale::kernel::cpu
