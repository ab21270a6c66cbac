// Products of tensors: matmul.cc finds the matrices in them and hands those to product_engine.h.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void matmul(const KernelArgs& args);  // a [.., m, k], b [.., k, n]
void addmm(const KernelArgs& args);   // c (broadcast to [m, n]), a [m, k], b [k, n]; AddmmAttrs
void linear(const KernelArgs& args);  // x [.., k], weight [n, k], bias [n] or none

}  // namespace chorale::kernel::cpu
