#include "chorale/kernel/cpu/product/product_engine.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/base/same_bits.h"
#include "chorale/kernel/cpu/blas/openblas.h"
#include "chorale/kernel/cpu/dnnl/gemm.h"
#include "chorale/kernel/cpu/dnnl/matmul.h"
#include "chorale/kernel/cpu/product/blas_layout.h"
#include "chorale/kernel/cpu/product/epilogue.h"
#include "chorale/kernel/cpu/product/half_product.h"
#include "chorale/kernel/cpu/product/integer_product.h"
#include "chorale/kernel/cpu/product/small_product.h"
#include "chorale/kernel/cpu/support/cpu_probe.h"
#include "chorale/kernel/cpu/support/one_thread.h"
#include "chorale/kernel/cpu/support/scratch.h"

namespace chorale::kernel::cpu {
namespace {

// Multiplications that pay for waking up a thread, where another program may have its core.
constexpr int64_t kEngineGrain = 1 << 19;

constinit thread_local ProductForm product_form = ProductForm::kByShape;

// gemm(): C = alpha op(A) op(B) + beta C, row-major, with the library that is best for T.
void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const float* a, int64_t lda, const float* b,
          int64_t ldb, double beta, float* c, int64_t ldc) {
  dnnl::sgemm(ta, tb, m, n, k, static_cast<float>(alpha), a, lda, b, ldb, static_cast<float>(beta), c, ldc);
}

int blas_int(int64_t value) {
  CHORALE_CHECK(value <= std::numeric_limits<int>::max(), "[product] a dimension or stride of ", value,
                " is more than BLAS counts with (2^31 - 1); cut the product into pieces");
  return static_cast<int>(value);
}

template <class T>
void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const T* a, int64_t lda, const T* b,
          int64_t ldb, double beta, T* c, int64_t ldc) {
  using blas::OpenBlas;
  const OpenBlas& blas = blas::openblas();
  const auto call = [&](auto function, auto scale, auto old_scale) {
    function(OpenBlas::kRowMajor, ta ? OpenBlas::kTrans : OpenBlas::kNoTrans,
             tb ? OpenBlas::kTrans : OpenBlas::kNoTrans, blas_int(m), blas_int(n), blas_int(k), scale, a, blas_int(lda),
             b, blas_int(ldb), old_scale, c, blas_int(ldc));
  };
  if constexpr (std::is_same_v<T, double>) {
    call(blas.dgemm, alpha, beta);
  } else {
    using Real = typename T::value_type;
    const T scale(static_cast<Real>(alpha)), old_scale(static_cast<Real>(beta));
    call(std::is_same_v<T, complex64> ? blas.cgemm : blas.zgemm, &scale, &old_scale);
  }
}

// Bias and epilogue of one C; only floating dtypes have them.
template <class T>
void finish_one(const Product& p, T* c) {
  if constexpr (std::is_floating_point_v<T>) finish(p.dtype, c, p.m, p.n, p.c_row, p.c_col, p.bias, p.epilogue);
}

template <class T>
struct Operand {
  bool transposed;
  int64_t ld;
  const T* data;
};

// The matrix itself where BLAS can read it, else a copy in `space`.
template <class T>
Operand<T> operand(const T* data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
                   const Scratch& space) {
  const BlasLayout layout = blas_layout(rows, cols, row_stride, col_stride);
  if (layout.fits) return {layout.transposed, layout.ld, data};
  pack(data, rows, cols, row_stride, col_stride, space.as<T>());
  return {false, cols, space.as<T>()};
}

template <class T>
size_t packed_bytes(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  return blas_layout(rows, cols, row_stride, col_stride).fits ? 0 : static_cast<size_t>(rows * cols) * sizeof(T);
}

// Matrices [begin, end) of the batch, one after the other.
template <class T>
void product_range(const Product& p, int64_t begin, int64_t end) {
  const Scratch space_a(packed_bytes<T>(p.m, p.k, p.a_row, p.a_col));
  const Scratch space_b(packed_bytes<T>(p.k, p.n, p.b_row, p.b_col));
  const BlasLayout layout = blas_layout(p.m, p.n, p.c_row, p.c_col);
  const Scratch space_c(layout.fits ? 0 : static_cast<size_t>(p.m * p.n) * sizeof(T));
  for (int64_t i = begin; i < end; ++i) {
    const auto a = operand(static_cast<const T*>(p.a) + i * p.a_batch, p.m, p.k, p.a_row, p.a_col, space_a);
    const auto b = operand(static_cast<const T*>(p.b) + i * p.b_batch, p.k, p.n, p.b_row, p.b_col, space_b);
    T* c = static_cast<T*>(p.c) + i * p.c_batch;
    if (layout.fits && layout.transposed) {
      // C is stored transposed: its transpose is op(B)^T op(A)^T.
      gemm(!b.transposed, !a.transposed, p.n, p.m, p.k, p.alpha, b.data, b.ld, a.data, a.ld, p.beta, c, layout.ld);
    } else {
      T* out = layout.fits ? c : space_c.as<T>();
      if (!layout.fits && p.beta != 0) pack<T>(c, p.m, p.n, p.c_row, p.c_col, out);
      gemm(a.transposed, b.transposed, p.m, p.n, p.k, p.alpha, a.data, a.ld, b.data, b.ld, p.beta, out,
           layout.fits ? layout.ld : p.n);
      if (!layout.fits) unpack<T>(out, p.m, p.n, c, p.c_row, p.c_col);
    }
    finish_one(p, c);
  }
}

template <class T>
void product_of(const Product& p) {
  // Many small matrices: a thread takes whole ones. Few large ones: all threads share each.
  if (p.batch >= thread_count()) {
    const int64_t grain = std::max<int64_t>(1, kEngineGrain / std::max<int64_t>(1, p.m * p.n * p.k));
    parallel_for(p.batch, grain, [&](int64_t begin, int64_t end) { product_range<T>(p, begin, end); });
  } else {
    product_range<T>(p, 0, p.batch);
  }
}

// Whether oneDNN's primitive beats its plain sgemm. On one and two cores of Zen 4 (AVX-512) it does where B is stored
// transposed, as the weights of a linear layer are (32 x 1000 x 2048: 1.6 ms against 2.4), and for narrow results (5000
// x 64 x 64: 363 us against 401); elsewhere sgemm is as fast or faster, up to a third. The choice depends on the shape
// alone, so that equal calls give equal bits.
bool primitive_wins(const Product& p) {
  if (p.batch != 1 || p.alpha != 1 || p.beta != 0 || !cpu_probe().avx512 || p.a_col != 1 || p.c_col != 1) return false;
  return (p.m >= 12 && p.b_row == 1 && p.b_col >= p.k) || (p.m >= 256 && p.n <= 64);
}

// k == 0: nothing is added to beta * C.
template <class T>
void scale(const Product& p) {
  for (int64_t i = 0; i < p.batch; ++i) {
    T* c = static_cast<T*>(p.c) + i * p.c_batch;
    for (int64_t row = 0; row < p.m; ++row) {
      for (int64_t col = 0; col < p.n; ++col) {
        T& x = c[row * p.c_row + col * p.c_col];
        if constexpr (is_complex(dtype_of<T>)) {
          x = p.beta == 0 ? T(0) : x * static_cast<typename T::value_type>(p.beta);
        } else {
          x = p.beta == 0 ? T(0) : static_cast<T>(static_cast<T>(p.beta) * x);
        }
      }
    }
    finish_one(p, c);
  }
}

template <class T>
void product_in(const Product& p) {
  if (p.k == 0) return scale<T>(p);
  if constexpr (std::is_same_v<T, float>) {
    const bool can = p.batch == 1 && p.alpha == 1 && p.beta == 0;
    const bool wins =
        product_form == ProductForm::kByShape ? primitive_wins(p) : can && product_form == ProductForm::kPrimitive;
    if (wins && dnnl::matmul(p, DType::kF32)) return;
  }
  if constexpr (std::is_integral_v<T>) {
    integer_product(p);
  } else {
    product_of<T>(p);
  }
}

void product_by_dtype(const Product& p) {
  const OneThread alone(p.batch * p.m * p.n * p.k < 2 * kEngineGrain);
  CHORALE_CHECK(is_floating(p.dtype) || (p.bias == nullptr && p.epilogue == Epilogue::kNone),
                "[product] a bias or an activation needs a floating dtype, found ", p.dtype);
  switch (p.dtype) {
    case DType::kF32:
      return product_in<float>(p);
    case DType::kF64:
      return product_in<double>(p);
    case DType::kC64:
      return product_in<complex64>(p);
    case DType::kC128:
      return product_in<complex128>(p);
    case DType::kU8:
      return product_in<uint8_t>(p);
    case DType::kI8:
      return product_in<int8_t>(p);
    case DType::kI16:
      return product_in<int16_t>(p);
    case DType::kI32:
      return product_in<int32_t>(p);
    case DType::kI64:
      return product_in<int64_t>(p);
    case DType::kF16:
    case DType::kBF16:
      return half_product(p);
    case DType::kBool:
      break;
  }
  throw InvalidArgument(concat("[product] no matrix product of ", p.dtype, "; convert it first"));
}

// Note [Same bits]. A library sums an element in an order that depends on how it shares a product out among threads.
// Here the product is cut into pieces by its shape alone, and each piece is a product of one thread's.
void product_in_pieces(const Product& p) {
  constexpr int64_t kSide = 64;  // rows or columns of a piece: enough for the libraries' own blocks
  const bool by_rows = p.m >= p.n;
  const int64_t side = by_rows ? p.m : p.n, pieces = (side + kSide - 1) / kSide;
  const auto elem = static_cast<int64_t>(size_of(p.dtype));
  const auto moved = [&](const void* data, int64_t elems) {
    return static_cast<const std::byte*>(data) + elems * elem;
  };
  const int64_t work = kSide * (by_rows ? p.n : p.m) * p.k;
  const ProductForm form = product_form;  // of the caller's thread
  parallel_for(p.batch * pieces, std::max<int64_t>(1, kEngineGrain / std::max<int64_t>(1, work)),
               [&](int64_t begin, int64_t end) {
                 const OneThread alone;
                 const ProductFormScope scope(form);
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t matrix = i / pieces, first = i % pieces * kSide;
                   Product piece = p;
                   piece.batch = 1;
                   (by_rows ? piece.m : piece.n) = std::min(kSide, side - first);
                   piece.a = moved(p.a, matrix * p.a_batch + (by_rows ? first * p.a_row : 0));
                   piece.b = moved(p.b, matrix * p.b_batch + (by_rows ? 0 : first * p.b_col));
                   piece.c =
                       const_cast<std::byte*>(moved(p.c, matrix * p.c_batch + first * (by_rows ? p.c_row : p.c_col)));
                   if (!by_rows && p.bias != nullptr) piece.bias = moved(p.bias, first);
                   product_by_dtype(piece);
                 }
               });
}

}  // namespace

ProductFormScope::ProductFormScope(ProductForm form) : before_(std::exchange(product_form, form)) {}
ProductFormScope::~ProductFormScope() { product_form = before_; }

void product(const Product& original) {
  if (original.batch <= 0 || original.m <= 0 || original.n <= 0) return;
  Product p = original;
  // One B for the whole batch and rows of A and C that go on from matrix to matrix: one tall product.
  if (p.batch > 1 && p.b_batch == 0 && p.a_batch == p.m * p.a_row && p.c_batch == p.m * p.c_row) {
    p.m *= p.batch;
    p.batch = 1;
  }
  if (p.k > 0 && product_form == ProductForm::kByShape && small_product(p)) return;
  if (same_bits() && p.k > 0) return product_in_pieces(p);
  product_by_dtype(p);
}

}  // namespace chorale::kernel::cpu
