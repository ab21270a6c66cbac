#include "chorale/kernel/cuda/small_product.h"

#include <algorithm>

#include "chorale/kernel/cuda/family.h"

namespace chorale::cuda {
extern const std::string_view kSmallProductCu;
}

namespace chorale::kernel::cuda {
namespace {

// What the kernel sees (small_product.cu).
struct Small {
  int64_t m, n, k;
  int64_t a_row, a_col, b_row, b_col, c_row;
  int64_t batch, a_batch, b_batch, c_batch;
  const void *a, *b, *bias;
  void* c;
  double alpha, beta;
};

// On an H200, in a replayed step: 32 x 512 by 512 x 10 takes 2.1 us, and 7.3 by cuBLASLt, which puts sums together in a
// second kernel; 8 x 20 by 20 x 32 takes 2.1 and 2.3.
constexpr double kMostOperations = 1 << 18;
constexpr int64_t kLongSum = 128;

}  // namespace

bool multiply_small(const Product& p, Stream stream) {
  const double operations =
      static_cast<double>(p.m * p.n) * static_cast<double>(p.batch) * static_cast<double>(std::max<int64_t>(1, p.k));
  if ((p.dtype != DType::kF32 && p.dtype != DType::kF64) || p.c_dtype != p.dtype || operations > kMostOperations)
    return false;
  const bool by_warps = p.k >= kLongSum;
  const int64_t threads = p.m * p.n * p.batch * (by_warps ? 32 : 1);
  constexpr unsigned kThreads = 64;  // few, so that many multiprocessors take part
  launch(instance(stream, chorale::cuda::kSmallProductCu, "small_product", {p.dtype}, by_warps ? "true" : "false"),
         {.x = static_cast<unsigned>((threads + kThreads - 1) / kThreads), .threads = kThreads}, stream,
         Small{p.m, p.n, p.k, p.a_row, p.a_col, p.b_row, p.b_col, p.c_row, p.batch, p.a_batch, p.b_batch, p.c_batch,
               p.a, p.b, p.bias, p.c, p.alpha, p.beta});
  return true;
}

}  // namespace chorale::kernel::cuda
