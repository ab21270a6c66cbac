// Inside io: the names that safetensors has for dtypes.
#pragma once

#include <optional>
#include <string_view>

#include "chorale/base/dtype.h"

namespace chorale::io {

struct SafetensorsDType {
  std::string_view name;
  size_t bytes;
  std::optional<DType> dtype;  // nothing: tensors have no such dtype
};
// Null for a name that the format does not know, and for c128, which it has no name for.
const SafetensorsDType* find_safetensors_dtype(std::string_view name);
const SafetensorsDType* find_safetensors_dtype(DType dtype);

}  // namespace chorale::io
