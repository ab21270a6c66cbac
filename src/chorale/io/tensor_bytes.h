// Inside io: tensors on the bytes of files, and their bytes as they go into one.
#pragma once

#include "chorale/io/file.h"
#include "chorale/tensor/tensor.h"

namespace chorale::io {

// A tensor whose element 0 is at byte `begin` of the file: read-only and on the mapping itself, which then lives as
// long as the tensor; a copy where the file keeps it at an address that its dtype cannot have, or in the other byte
// order. The bytes must be there.
enum class ByteOrder : uint8_t { kLittle, kBig };
Tensor tensor_in_file(const std::shared_ptr<const MappedFile>& file, size_t begin, const Shape& sizes,
                      const Strides& strides, DType dtype, ByteOrder order = ByteOrder::kLittle);
// Turns the bytes of every element of a dense tensor around (of both parts of a complex one).
void swap_bytes(const Tensor& x);

// x itself when it is contiguous, otherwise a contiguous copy. Throws InvalidArgument, naming `what`, when x is
// undefined, sparse, or not in the host's memory.
Tensor contiguous_for_file(std::string_view what, const Tensor& x);
// The bytes of a contiguous tensor.
std::span<const std::byte> bytes_of(const Tensor& x);

}  // namespace chorale::io
