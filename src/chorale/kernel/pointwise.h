// Which dtypes a pointwise call computes in: shared by inference and kernels of every device.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/vec/scalar_ops.h"

namespace chorale::kernel {

enum class Promotion : uint8_t {
  kSame,    // tensors and numbers decide together
  kFloat,   // the same, and integers and bools become f32
  kScaled,  // tensors decide; a number must fit their category (the alpha of x + alpha * y)
};

// What a row says of itself.
struct Pointwise {
  vec::ScalarOp op;
  Promotion promotion = Promotion::kSame;
};

// The dtype in which tensors and numbers are combined: tensors with dimensions decide, then those without, then
// numbers; a later kind counts only when its category is higher. The condition of a masked operation does not take
// part.
DType common_dtype(const Pointwise& pointwise, std::span<const Tensor> in, const Attrs& attrs);

// The dtype of the loop for that common dtype. 16-bit types compute in f32, unless only bytes are moved; bool goes
// through u8 where the operation knows integers but not bool. Nothing (false) where the operation makes no sense.
bool loop_dtype(vec::ScalarOp op, DType common, DType& loop);

// The dtype of the result.
inline DType result_dtype(vec::ScalarKind kind, DType common) {
  return kind == vec::ScalarKind::kPredicate ? DType::kBool
         : kind == vec::ScalarKind::kToReal  ? real_of(common)
                                             : common;
}

}  // namespace chorale::kernel
