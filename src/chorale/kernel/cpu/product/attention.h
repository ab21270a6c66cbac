// Attention over tensors [leading…, heads, length, depth]: cuts the work into heads and blocks of queries, and brings
// operands into the form that attention_core.h wants. Rows whose last dimension is contiguous are read where they are.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// q, k, v, mask? -> out, logsumexp; AttentionAttrs
void attention(const KernelArgs& args);
// dout?, dlogsumexp?, q, k, v, mask?, out, logsumexp -> dq, dk, dv
void attention_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
