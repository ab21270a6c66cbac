// matmul, addmm and linear on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// c = alpha a b + beta c, for matrices in the last two dimensions and a batch in those before; c may be wider than a
// and b, and its rows are contiguous.
void multiply(const Tensor& a, const Tensor& b, const Tensor& c, Stream stream, double alpha = 1, double beta = 0);

void matmul(const KernelArgs& args);
void addmm(const KernelArgs& args);
void linear(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
