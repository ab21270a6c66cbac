// Inside io: the elements of a tensor as they go into a file.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::io {

// x itself when it is contiguous, otherwise a contiguous copy. Throws InvalidArgument, naming `what`, when x is
// undefined, sparse, or not in the host's memory.
Tensor contiguous_for_file(std::string_view what, const Tensor& x);
// The bytes of a contiguous tensor.
std::span<const std::byte> bytes_of(const Tensor& x);

}  // namespace chorale::io
