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
// Whether these kernels can read and write such memory; undefined ones are not there.
bool reads_columns(std::initializer_list<const Tensor*> matrices, int64_t channels);
// Fills norm.mean and norm.variance, and y. With `relu` y is the ReLU of what is normalised and of `other`, if that is
// defined, added to it.
void normalize_columns(const Tensor& x, const ChannelNorm& norm, const Tensor& y, Stream stream, bool relu = false,
                       const Tensor& other = {});

// What comes back to a norm.
struct ChannelSlopes {
  Tensor dy;
  bool relu = false;  // there was a ReLU behind the norm
  Tensor result{};    // the result of the ReLU, if something was added between it and the norm
  Tensor other{},
      through{};  // with `result`: dy + other is what comes back, if other is defined; what the ReLU lets through
};
void normalize_columns_backward(const ChannelSlopes& slopes, const Tensor& x, const ChannelNorm& norm, const Tensor& dx,
                                const Tensor& dweight, const Tensor& dbias, Stream stream);

}  // namespace chorale::kernel::cuda
