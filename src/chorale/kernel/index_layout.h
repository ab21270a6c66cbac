// x[i0, i1, …] with a tensor (or nothing) per dimension: which shape results.
#pragma once

#include <span>

#include "chorale/tensor/tensor.h"

namespace chorale::kernel {

struct IndexLayout {
  Shape picked;      // of the indices, broadcast against each other
  size_t first = 0;  // indexed dimension,
  size_t last = 0;   // and the last one
  bool aside =
      true;  // indexed dimensions stand side by side, and the picked ones take their place; otherwise these come first
  Shape result;
};

// indices[d] belongs to dimension d; undefined, or missing at the end, means the whole of it. At least one is defined.
// Throws InvalidArgument, naming `op`.
IndexLayout index_layout(const char* op, const Shape& x, std::span<const Tensor> indices);

}  // namespace chorale::kernel
