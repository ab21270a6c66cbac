// Factorisations and triangular systems, f32 and f64, over batches of matrices.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/linalg_attrs.h"

namespace chorale::kernel::cpu {

// in: a, of which one triangle is read. InvalidArgument names the leading minor that is not positive.
void cholesky(const KernelArgs& args);
// in: a, b with equal batch dimensions; out: x with a x = b.
void solve_triangular(const KernelArgs& args);
// out: q, r, reduced.
void qr(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
