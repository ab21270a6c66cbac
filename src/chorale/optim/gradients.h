// The gradients of many parameters as stretches of memory, for passes over all of them.
#pragma once

#include <vector>

#include "chorale/base/parallel_for.h"
#include "chorale/tensor/tensor.h"

namespace chorale::optim {

// A piece of one gradient.
struct GradientChunk {
  void* data;
  int64_t n;
  DType dtype;
  uint32_t parameter;  // index into the parameters
};

// Chunks are of one size whatever the threads, so that what is summed over them does not depend on threads either.
// Parameters without a gradient have none; gradients with holes are replaced by contiguous ones, sparse ones by
// coalesced ones, whose values count. `caller` is for the StateError when no parameter has a gradient at all.
std::vector<GradientChunk> gradient_chunks(const char* caller, std::span<const Tensor> parameters);

// Calls body(chunk, i) for every chunk, on several threads.
void for_each_chunk(std::span<const GradientChunk> chunks,
                    FunctionRef<void(const GradientChunk& chunk, size_t i)> body);

// After a pass that wrote: whoever saved a gradient for later notices.
void note_gradient_writes(const char* writer, std::span<const Tensor> parameters);

}  // namespace chorale::optim
