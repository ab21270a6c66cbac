// oneDNN's matmul primitive: better than dnnl_sgemm for some shapes, and the one that knows bf16.
#pragma once

#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::kernel::cpu::dnnl {

// Whether the CPU has bf16 products that beat converting to f32.
bool has_fast_bf16();

// Does a whole f32 or bf16 product with alpha 1 and beta 0, and returns true; C may be f32 where A and B are bf16.
// Returns false, with nothing done, for strides that oneDNN does not take. The shape's first call costs a fraction of a
// millisecond more.
bool matmul(const Product& p, DType c_dtype);

}  // namespace chorale::kernel::cpu::dnnl
