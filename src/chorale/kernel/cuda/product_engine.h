// Products of matrices by cuBLASLt.
#pragma once

#include "chorale/base/dtype.h"
#include "chorale/device/device.h"
#include "chorale/kernel/fp8.h"

namespace chorale::kernel::cuda {

// c = alpha a b + beta c (+ bias to each row), for every matrix of the batch. Strides are in elements, and any.
struct Product {
  DType dtype = DType::kF32;
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  int64_t a_row = 0, a_col = 0, b_row = 0, b_col = 0, c_row = 0;  // c's rows are contiguous
  int64_t batch = 1, a_batch = 0, b_batch = 0, c_batch = 0;
  double alpha = 1, beta = 0;
  const void* bias = nullptr;    // n elements of dtype
  DType c_dtype = DType::kBool;  // of c where it differs from dtype; kBool: it does not
  // With kU8, a and b are numbers of 8 bits, times what stands in the GPU's memory there; c has a dtype of its own, the
  // bias that of c. cuBLASLt wants both to be contiguous along k, and all sizes to be multiples of 16.
  Fp8 a_format = Fp8::kE4m3, b_format = Fp8::kE4m3;
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
};

// Floating and complex dtypes. Integers are multiplied by a kernel of our own.
void product(const Product& p, Stream stream);

// Whether a matrix of these sizes and strides can be read as it is: one of its dimensions is contiguous.
bool is_readable(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride);

}  // namespace chorale::kernel::cuda
