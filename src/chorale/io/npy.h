// NumPy's .npy files, versions 1 to 3.
#pragma once

#include "chorale/io/file.h"
#include "chorale/tensor/tensor.h"

namespace chorale::io {

// The array on the mapped file itself, read-only (see MappedFile); in Fortran order it is a tensor whose first
// dimension moves fastest. An array of the other byte order is copied. NumPy has no bf16 of its own: two bytes without
// a type
// ("V2"), which is what its ml_dtypes package writes, are taken for it. Throws InvalidArgument for a damaged file, and
// for arrays of objects, records, text, dates and unsigned integers of more than 8 bits.
Tensor load_npy(const std::filesystem::path& path);
// Writes atomically, in C order.
void save_npy(const std::filesystem::path& path, const Tensor& tensor);

// What the header says; the elements follow it and fill the file.
struct NpyHeader {
  DType dtype = DType::kF32;
  bool big_endian = false;
  bool fortran_order = false;
  Shape sizes;
  size_t data_begin = 0;
};
NpyHeader parse_npy(const std::string& what, std::string_view file);

}  // namespace chorale::io
