#include "chorale/kernel/cpu/product/half_product.h"

#include <algorithm>
#include <utility>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/dnnl/matmul.h"
#include "chorale/kernel/cpu/product/blas_layout.h"
#include "chorale/kernel/cpu/product/half_row_product.h"
#include "chorale/kernel/cpu/support/scratch.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

// Conversions that pay for waking up a thread.
constexpr int64_t kHalfGrain = 1 << 15;

const uint16_t* at(const void* data, int64_t offset) { return static_cast<const uint16_t*>(data) + offset; }
uint16_t* at(void* data, int64_t offset) { return static_cast<uint16_t*>(data) + offset; }

// A 16-bit matrix as f32: contiguous, in the order of its own storage.
struct Converted {
  const float* data;
  int64_t row, col;
};

Converted widen(DType dtype, const uint16_t* in, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
                float* out) {
  if (rows == 0 || cols == 0) return {out, cols, 1};
  const vec::Convert convert = vec::convert_loop(dtype, DType::kF32);
  if (rows > 1 && (cols == 1 || (row_stride == 1 && col_stride != 1))) {
    const Converted transposed = widen(dtype, in, cols, rows, col_stride, row_stride, out);
    return {out, transposed.col, transposed.row};
  }
  parallel_for(rows, std::max<int64_t>(1, kHalfGrain / cols), [&](int64_t begin, int64_t end) {
    if (col_stride == 1 && row_stride == cols)
      return convert(in + begin * cols, out + begin * cols, (end - begin) * cols);
    const Scratch row(col_stride == 1 ? 0 : static_cast<size_t>(cols) * sizeof(uint16_t));
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t* from = in + i * row_stride;
      if (col_stride != 1) {
        vec::gather_strided(from, col_stride * 2, row.as<uint16_t>(), cols, 2);
        from = row.as<uint16_t>();
      }
      convert(from, out + i * cols, cols);
    }
  });
  return {out, cols, 1};
}

void narrow(DType dtype, const float* in, int64_t rows, int64_t cols, uint16_t* out, int64_t row_stride,
            int64_t col_stride) {
  if (rows > 1 && cols == 1) return narrow(dtype, in, 1, rows, out, rows, row_stride);
  const vec::Convert convert = vec::convert_loop(DType::kF32, dtype);
  parallel_for(rows, std::max<int64_t>(1, kHalfGrain / cols), [&](int64_t begin, int64_t end) {
    if (col_stride == 1 && row_stride == cols)
      return convert(in + begin * cols, out + begin * cols, (end - begin) * cols);
    const Scratch row(col_stride == 1 ? 0 : static_cast<size_t>(cols) * sizeof(uint16_t));
    for (int64_t i = begin; i < end; ++i) {
      uint16_t* to = out + i * row_stride;
      convert(in + i * cols, col_stride == 1 ? to : row.as<uint16_t>(), cols);
      if (col_stride != 1) vec::scatter_strided(row.as<uint16_t>(), to, col_stride * 2, cols, 2);
    }
  });
}

bool is_row(const Product& p) { return p.m == 1 && p.k > 0 && (p.b_row == 1 || p.b_col == 1); }

// sums = a B for one row, columns shared out to threads.
void row_product(const Product& p, const float* a, const uint16_t* b, float* sums) {
  const bool by_columns = p.b_row == 1 && p.b_col != 1;
  parallel_for(p.n, std::max<int64_t>(1, (1 << 16) / p.k), [&](int64_t begin, int64_t end) {
    const auto function = by_columns ? half_row_by_columns : half_row_by_rows;
    function(p.dtype, a, b + begin * p.b_col, by_columns ? p.b_col : p.b_row, end - begin, p.k, sums + begin);
  });
}

// Matrices [begin, end) of the batch, with operands and result in f32.
void convert_and_multiply(const Product& p, int64_t begin, int64_t end) {
  const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
  const bool row = is_row(p);
  const Scratch a_space(floats(p.m * p.k)), b_space(row ? floats(p.n) : floats(p.k * p.n)), c_space(floats(p.m * p.n)),
      bias_space(p.bias != nullptr ? floats(p.n) : 0);
  if (p.bias != nullptr) vec::convert_loop(p.dtype, DType::kF32)(p.bias, bias_space.as<float>(), p.n);
  auto* c32 = c_space.as<float>();
  Converted a{}, b{};
  for (int64_t i = begin; i < end; ++i) {
    const uint16_t* b16 = at(p.b, i * p.b_batch);
    uint16_t* c16 = at(p.c, i * p.c_batch);
    // What all matrices of the batch share is converted once.
    if (i == begin || p.a_batch != 0)
      a = widen(p.dtype, at(p.a, i * p.a_batch), p.m, p.k, p.a_row, p.a_col, a_space.as<float>());
    if (p.beta != 0) {
      for (int64_t j = 0; j < p.m; ++j) widen(p.dtype, c16 + j * p.c_row, 1, p.n, p.n, p.c_col, c32 + j * p.n);
    }
    Product f32{.dtype = DType::kF32,
                .m = p.m,
                .n = p.n,
                .k = p.k,
                .a = nullptr,
                .b = nullptr,
                .c = c32,
                .a_row = 1,
                .a_col = 1,
                .b_row = p.n,
                .b_col = 1,
                .c_row = p.n,
                .c_col = 1,
                .bias = p.bias != nullptr ? bias_space.as<float>() : nullptr,
                .alpha = p.alpha,
                .beta = p.beta,
                .epilogue = p.epilogue};
    if (row) {
      // What is left is the product of 1 and the sums: scales, bias and epilogue.
      static constexpr float kOne = 1;
      row_product(p, a.data, b16, b_space.as<float>());
      f32.k = 1;
      f32.a = &kOne;
      f32.b = b_space.as<float>();
    } else {
      if (i == begin || p.b_batch != 0) b = widen(p.dtype, b16, p.k, p.n, p.b_row, p.b_col, b_space.as<float>());
      f32.a = a.data;
      f32.a_row = a.row;
      f32.a_col = a.col;
      f32.b = b.data;
      f32.b_row = b.row;
      f32.b_col = b.col;
    }
    product(f32);
    narrow(p.dtype, c32, p.m, p.n, c16, p.c_row, p.c_col);
  }
}

// The product in bf16 instructions, if there are any worth using for it.
bool multiply_natively(const Product& p) {
  constexpr int64_t kWorthwhile = 32 * 32 * 32;
  if (p.dtype != DType::kBF16 || p.k == 0 || p.m == 1 || p.n == 1 || p.alpha != 1 || p.beta != 0) return false;
  return p.batch * p.m * p.n * p.k >= kWorthwhile && dnnl::has_fast_bf16() && dnnl::matmul(p, DType::kBF16);
}

}  // namespace

void half_product(const Product& original) {
  if (multiply_natively(original)) return;
  Product p = original;
  // One column is the row of the transposed product.
  if (p.n == 1 && p.m > 1 && p.bias == nullptr) {
    std::swap(p.m, p.n);
    std::swap(p.a, p.b);
    std::swap(p.a_batch, p.b_batch);
    std::swap(p.a_row, p.b_col);
    std::swap(p.a_col, p.b_row);
    std::swap(p.c_row, p.c_col);
  }
  const int64_t elems = std::max<int64_t>(1, p.m * p.k + p.k * p.n);
  if (p.batch >= thread_count()) {
    parallel_for(p.batch, std::max<int64_t>(1, kHalfGrain / elems),
                 [&](int64_t begin, int64_t end) { convert_and_multiply(p, begin, end); });
  } else {
    convert_and_multiply(p, 0, p.batch);
  }
}

}  // namespace chorale::kernel::cpu
