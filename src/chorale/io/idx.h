// IDX, the format of the MNIST family of data sets: a tensor in big-endian order, plain or compressed by gzip.
#pragma once

#include "chorale/io/file.h"
#include "chorale/tensor/tensor.h"

namespace chorale::io {

// Throw InvalidArgument, naming the file, when its sizes do not match its length or it is damaged.
Tensor load_idx(const std::filesystem::path& path);
Tensor parse_idx(const std::string& what, std::span<const std::byte> bytes);

}  // namespace chorale::io
