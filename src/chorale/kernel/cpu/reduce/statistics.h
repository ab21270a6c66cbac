// Reductions that keep more than one number, or change it at the end: norms, variances, log-sum-exp.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/reduce_attrs.h"

namespace chorale::kernel::cpu {

void norm(const KernelArgs& args);
void var(const KernelArgs& args);
void stddev(const KernelArgs& args);
void logsumexp(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
