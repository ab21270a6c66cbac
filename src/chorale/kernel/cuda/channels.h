// Batch normalisation where the channels of a place lie side by side: a matrix with one column per channel.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// What is normalised per channel; weight and bias may be undefined. Vectors are of the type that is computed in.
struct ChannelNorm {
  int64_t rows, channels;
  Tensor mean, variance, weight, bias;
  double eps;
};
// Whether these kernels can read and write such memory.
bool reads_columns(std::initializer_list<const Tensor*> matrices, int64_t channels);
// Fills norm.mean and norm.variance, and y.
void normalize_columns(const Tensor& x, const ChannelNorm& norm, const Tensor& y, Stream stream);
void normalize_columns_backward(const Tensor& dy, const Tensor& x, const ChannelNorm& norm, const Tensor& dx,
                                const Tensor& dweight, const Tensor& dbias, Stream stream);

}  // namespace chorale::kernel::cuda
