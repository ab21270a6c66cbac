// Matrix products on the CPU, for every dtype and any strides. This is the engine: it knows pointers and strides, no
// tensors.
#pragma once

#include <cstdint>

#include "chorale/base/dtype.h"

namespace chorale::kernel::cpu {

// What is done to each element of the result before it is stored for the last time; f32, f64 and the 16-bit types only.
enum class Epilogue : uint8_t { kNone, kRelu, kGeluErf, kGeluTanh };

// C[b] = epilogue(beta * C[b] + alpha * A[b] B[b] + bias), with A[b] m x k, B[b] k x n, C[b] m x n and bias a
// contiguous row of n values added to each row of C. Strides count elements; any are allowed, those of C must give
// distinct addresses. A matrix one of whose strides is 1 is never copied. C is not read where beta is 0, so it may hold
// anything then, NaN included; it must not overlap the other operands. The 16-bit types accumulate in f32 and round
// once; integers wrap.
struct Product {
  DType dtype;
  int64_t batch = 1, m, n, k;
  const void* a;
  const void* b;
  void* c;
  int64_t a_batch = 0, a_row, a_col;
  int64_t b_batch = 0, b_row, b_col;
  int64_t c_batch = 0, c_row, c_col;
  const void* bias = nullptr;
  double alpha = 1, beta = 0;
  Epilogue epilogue = Epilogue::kNone;
};

// Which of the library's two forms computes the f32 products of a thread: as shapes say (own loops for small ones), or
// the one that somebody has measured to be faster (codegen/tune.h).
enum class ProductForm : uint8_t { kByShape, kGemm, kPrimitive };
class ProductFormScope {
 public:
  explicit ProductFormScope(ProductForm form);
  ~ProductFormScope();
  ProductFormScope(const ProductFormScope&) = delete;
  ProductFormScope& operator=(const ProductFormScope&) = delete;

 private:
  ProductForm before_;
};

// Uses up to thread_count() threads; small work stays on the calling thread. Throws InvalidArgument for a bool product
// and for an epilogue or bias that the dtype does not have, StateError if the dtype needs OpenBLAS and it is not
// installed.
void product(const Product& p);

}  // namespace chorale::kernel::cpu
