#include "chorale/app/bench/steps_floor.h"

#include <cstring>
#include <limits>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/app/bench/bench.h"
#include "chorale/kernel/cpu/dnnl/gemm.h"
#include "chorale/kernel/cpu/dnnl/matmul.h"

namespace chorale::app {
namespace {

double median_seconds(const std::function<void()>& run) {
  run();  // makes primitives
  std::vector<double> seconds;
  seconds.reserve(5);
  for (int i = 0; i < 5; ++i) seconds.push_back(seconds_of(run, 1));
  return median(seconds);
}

// C[m, n] = op(A)[m, k] op(B)[k, n].
double product_seconds(bool turn_a, bool turn_b, int64_t m, int64_t n, int64_t k) {
  const Tensor a = uniform({m * k}), b = uniform({k * n}), c = empty({m * n});
  const double plain = median_seconds([&] {
    kernel::cpu::dnnl::sgemm(turn_a, turn_b, m, n, k, 1, a.data<float>(), turn_a ? m : k, b.data<float>(),
                             turn_b ? k : n, 0, c.data<float>(), n);
  });
  const kernel::cpu::Product product{.dtype = DType::kF32,
                                     .m = m,
                                     .n = n,
                                     .k = k,
                                     .a = a.raw(),
                                     .b = b.raw(),
                                     .c = c.raw(),
                                     .a_row = turn_a ? 1 : k,
                                     .a_col = turn_a ? m : 1,
                                     .b_row = turn_b ? 1 : n,
                                     .b_col = turn_b ? k : 1,
                                     .c_row = n,
                                     .c_col = 1};
  if (!kernel::cpu::dnnl::matmul(product, DType::kF32)) return plain;
  return std::min(plain, median_seconds([&] { kernel::cpu::dnnl::matmul(product, DType::kF32); }));
}

// A layer from `in` to `out` features over `lines` lines: forward, gradient of the input (where wanted), of the weight.
double layer_seconds(int64_t lines, int64_t in, int64_t out, bool input_gradient = true) {
  return product_seconds(false, true, lines, out, in) + product_seconds(true, false, out, in, lines) +
         (input_gradient ? product_seconds(false, false, lines, in, out) : 0);
}

// AdamW reads parameter, gradient and two moments, and writes all but the gradient; memcpy reads and writes.
double update_seconds(double parameters) {
  const Tensor from = uniform({int64_t{16} << 20}), to = empty({int64_t{16} << 20});
  const size_t bytes = static_cast<size_t>(from.elems()) * sizeof(float);
  const double copy = median_seconds([&] { std::memcpy(to.raw(), from.raw(), bytes); });
  return parameters * 7 * sizeof(float) * copy / (2 * static_cast<double>(bytes));
}

}  // namespace

double step_floor_ms(const std::string& model) {
  if (model == "mlp512x4") {
    return 1e3 * (layer_seconds(32, 512, 512, false) + 3 * layer_seconds(32, 512, 512) + layer_seconds(32, 512, 10) +
                  update_seconds(1'055'754));
  }
  if (model != "bert_256x4") return 0;
  // Attention of 32 heads, each over 128 tokens of 64 features: two products forward, four backward.
  const double attention =
      32 * (2 * product_seconds(false, true, 128, 128, 64) + 2 * product_seconds(false, false, 128, 64, 128) +
            2 * product_seconds(true, false, 128, 64, 128));
  const double block = layer_seconds(1024, 256, 768) + layer_seconds(1024, 256, 256) + layer_seconds(1024, 256, 1024) +
                       layer_seconds(1024, 1024, 256) + attention;
  return 1e3 * (4 * block + layer_seconds(1024, 256, 8192) + update_seconds(7'394'816));
}

}  // namespace chorale::app
