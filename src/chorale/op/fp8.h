// Linear layers whose products are of 8 bits: faster on GPUs from Ada on, and emulated elsewhere.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale {

// As linear(), for a weight [out, in] or, with `in_first`, [in, out]. x and weight are cast to e4m3, and in backward
// the gradient of y to e5m2, each times a scale of its own (Note [Scales of 8 bits] in kernel/fp8.h); sums are of f32.
Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, bool in_first = false);

namespace op {
extern const OpDef kFp8Linear, kFp8LinearBackward;
}

}  // namespace chorale
