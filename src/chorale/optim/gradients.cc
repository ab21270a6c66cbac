#include "chorale/optim/gradients.h"

#include <algorithm>

#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/op/sparse.h"

namespace chorale::optim {
namespace {

constexpr int64_t kChunkElems = 16384;

// Memory without holes that holds the gradient of x, and stays its gradient.
Tensor flat_gradient(const Tensor& x) {
  const NoGrad quiet;
  Tensor gradient = chorale::gradient(x);
  if (!gradient.defined()) return {};
  if (gradient.is_sparse()) {
    const Tensor sorted = coalesce(gradient);
    const Tensor values = contiguous(sorted.sparse().values);
    set_gradient(x, Tensor::sparse_coo(sorted.sparse().indices, values, gradient.sizes(), true));
    return values;
  }
  if (is_dense(gradient.sizes(), gradient.strides())) return gradient;
  gradient = contiguous(gradient);
  set_gradient(x, gradient);
  return gradient;
}

}  // namespace

std::vector<GradientChunk> gradient_chunks(const char* caller, std::span<const Tensor> parameters) {
  std::vector<GradientChunk> chunks;
  bool any = false;
  for (uint32_t p = 0; p < parameters.size(); ++p) {
    const Tensor gradient = flat_gradient(parameters[p]);
    if (!gradient.defined()) continue;
    any = true;
    CHORALE_CHECK(is_floating(gradient.dtype()), "[", caller, "] the gradient of parameter ", p, " is ",
                  gradient.dtype(), "; expected f16, bf16, f32 or f64");
    auto* const data = static_cast<std::byte*>(gradient.raw());
    for (int64_t at = 0; at < gradient.elems(); at += kChunkElems) {
      chunks.push_back({data + at * static_cast<int64_t>(gradient.elem_bytes()),
                        std::min(kChunkElems, gradient.elems() - at), gradient.dtype(), p});
    }
  }
  CHORALE_CHECK_STATE(any, "[", caller,
                      "] no parameter has a gradient: call backward first; an optimizer that updates in backward "
                      "leaves none and cannot be combined with this");
  return chunks;
}

void for_each_chunk(std::span<const GradientChunk> chunks,
                    FunctionRef<void(const GradientChunk& chunk, size_t i)> body) {
  parallel_for(static_cast<int64_t>(chunks.size()), 2, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) body(chunks[i], i);
  });
}

void note_gradient_writes(const char* writer, std::span<const Tensor> parameters) {
  for (const Tensor& x : parameters) {
    const Tensor gradient = chorale::gradient(x);
    if (!gradient.defined()) continue;
    (gradient.is_sparse() ? gradient.sparse().values : gradient).storage()->note_write(writer);
  }
}

}  // namespace chorale::optim
