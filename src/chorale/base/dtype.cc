#include "chorale/base/dtype.h"

#include <array>
#include <ostream>
#include <utility>

namespace chorale {
namespace {

constexpr std::array<std::string_view, kDTypeCount> kNames = {"bool", "u8",   "i8",  "i16", "i32", "i64",
                                                              "f16",  "bf16", "f32", "f64", "c64", "c128"};

}  // namespace

std::string_view name_of(DType dtype) { return kNames[static_cast<size_t>(dtype)]; }

DType dtype_from_name(std::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (name_of(dtype) == name) return dtype;
  }
  throw InvalidArgument(concat("unknown dtype '", name, "'; one of bool u8 i8 i16 i32 i64 f16 bf16 f32 f64 c64 c128"));
}

std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }

DType promote(DType a, DType b) {
  if (a == b) return a;
  if (a > b) std::swap(a, b);
  // Now b is the later one in the enumeration, so the result is b but for three pairs of equals.
  if (a == DType::kU8 && b == DType::kI8) return DType::kI16;
  if (a == DType::kF16 && b == DType::kBF16) return DType::kF32;
  if (a == DType::kF64 && b == DType::kC64) return DType::kC128;
  return b;
}

}  // namespace chorale
