#include "chorale/optim/clip.h"

#include <algorithm>
#include <cmath>

#include "chorale/base/error.h"
#include "chorale/optim/gradients.h"
#include "chorale/vec/loops.h"
#include "chorale/vec/update.h"

namespace chorale::optim {
namespace {

double reduced(vec::ReduceOp op, const GradientChunk& chunk) {
  alignas(16) std::byte accumulator[16];
  vec::reduce_identity(op, chunk.dtype, accumulator);
  vec::reduce_row(op, chunk.dtype)(chunk.data, chunk.n, accumulator);
  if (chunk.dtype == DType::kF64) return *reinterpret_cast<const double*>(accumulator);
  return static_cast<double>(*reinterpret_cast<const float*>(accumulator));
}

}  // namespace

double clip_grad_norm(std::span<const Tensor> parameters, double max_norm, const ClipNormOptions& options) {
  CHORALE_CHECK(max_norm > 0, "[clip_grad_norm] max_norm must be positive, not ", max_norm);
  const bool largest = std::isinf(options.norm_type) && options.norm_type > 0;
  CHORALE_CHECK(largest || options.norm_type == 1 || options.norm_type == 2,
                "[clip_grad_norm] norm_type is 1, 2 or infinity, not ", options.norm_type);
  const vec::ReduceOp op = largest                  ? vec::ReduceOp::kMaxAbs
                           : options.norm_type == 1 ? vec::ReduceOp::kSumAbs
                                                    : vec::ReduceOp::kSumSquares;
  const auto chunks = gradient_chunks("clip_grad_norm", parameters);
  std::vector<double> parts(chunks.size());
  for_each_chunk(chunks, [&](const GradientChunk& chunk, size_t i) { parts[i] = reduced(op, chunk); });
  double norm = 0;
  for (double part : parts) {
    if (largest) {
      norm = part > norm || std::isnan(part) ? part : norm;
    } else {
      norm += part;
    }
  }
  if (options.norm_type == 2) norm = std::sqrt(norm);
  if (!std::isfinite(norm)) {
    const auto bad = std::find_if(parts.begin(), parts.end(), [](double part) { return !std::isfinite(part); });
    CHORALE_CHECK_STATE(!options.error_if_nonfinite, "[clip_grad_norm] the norm of the gradients is ", norm,
                        bad == parts.end()
                            ? std::string(", beyond the largest number")
                            : concat("; the first parameter with a gradient that is not finite is number ",
                                     chunks[static_cast<size_t>(bad - parts.begin())].parameter));
    return norm;
  }
  if (const double factor = max_norm / (norm + 1e-6); factor < 1) {
    for_each_chunk(chunks, [&](const GradientChunk& chunk, size_t) {
      vec::scale_checked_loop(chunk.dtype)(chunk.data, chunk.n, factor);
    });
    note_gradient_writes("clip_grad_norm", parameters);
  }
  return norm;
}

void clip_grad_value(std::span<const Tensor> parameters, double limit) {
  CHORALE_CHECK(limit > 0, "[clip_grad_value] the limit must be positive, not ", limit);
  vec::Params params;
  params.f[0] = -limit;
  params.f[1] = limit;
  for_each_chunk(gradient_chunks("clip_grad_value", parameters), [&](const GradientChunk& chunk, size_t) {
    const void* in[1] = {chunk.data};
    vec::pointwise_loop(vec::ScalarOp::kClamp, chunk.dtype)(in, chunk.data, chunk.n, params);
  });
  note_gradient_writes("clip_grad_value", parameters);
}

}  // namespace chorale::optim
