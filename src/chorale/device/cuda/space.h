// A walk over operands of any strides, as kernels take it (Space in prelude.cu).
#pragma once

#include <string>

#include "chorale/base/error.h"
#include "chorale/device/cuda/compiler.h"
#include "chorale/vec/strided.h"

namespace chorale::cuda {

struct Space {
  int64_t elems = 0;
  int64_t dims = 0;
  int64_t sizes[8] = {};
  std::byte* data[5] = {};
  int64_t strides[5][8] = {};

  Space() = default;
  Space(const vec::StridedSpace& from, size_t operands) : elems(from.elems()), dims(from.dims()) {
    for (int d = 0; d < from.dims(); ++d) sizes[d] = from.size(d);
    for (size_t k = 0; k < operands; ++k) {
      data[k] = from[k].data;
      for (int d = 0; d < from.dims(); ++d) strides[k][d] = from[k].strides[d];
    }
  }
};

// Sees elements of `bytes` as units of up to 16, where all operands lie so that each unit holds neighbours; returns the
// bytes of a unit.
inline size_t widen_units(Space& space, size_t operands, size_t bytes) {
  const auto last = static_cast<size_t>(space.dims - 1);
  for (size_t unit = 16; unit > bytes; unit /= 2) {
    const auto wide = static_cast<int64_t>(unit), ratio = static_cast<int64_t>(unit / bytes);
    bool fits = space.sizes[last] % ratio == 0;
    for (size_t k = 0; k < operands && fits; ++k) {
      fits = space.strides[k][last] == static_cast<int64_t>(bytes) &&
             reinterpret_cast<uintptr_t>(space.data[k]) % unit == 0;
      for (size_t d = 0; d < last && fits; ++d) fits = space.strides[k][d] % wide == 0;
    }
    if (!fits) continue;
    space.sizes[last] /= ratio;
    space.elems /= ratio;
    for (size_t k = 0; k < operands; ++k) space.strides[k][last] = wide;
    return unit;
  }
  return bytes;
}

// A kernel of the prelude alone.
inline CUfunction prelude_kernel(Device device, const std::string& name) {
  return find_kernel(device, name, [&] { return KernelText{std::string(prelude()), name}; });
}
// The type that moves elements of so many bytes.
inline const char* unit_in_text(size_t bytes) {
  return bytes == 1 ? "u8" : bytes == 2 ? "i16" : bytes == 4 ? "i32" : bytes == 8 ? "i64" : "Unit16";
}

}  // namespace chorale::cuda
