// Element types: their sizes, names, categories and promotion.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/base/half.h"

namespace chorale {

// The order is the order of promotion inside a category (see promote()).
enum class DType : uint8_t { kBool, kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64, kC64, kC128 };
inline constexpr int kDTypeCount = 12;
inline constexpr DType kAllDTypes[kDTypeCount] = {DType::kBool, DType::kU8,  DType::kI8,  DType::kI16,
                                                  DType::kI32,  DType::kI64, DType::kF16, DType::kBF16,
                                                  DType::kF32,  DType::kF64, DType::kC64, DType::kC128};

using complex64 = std::complex<float>;
using complex128 = std::complex<double>;

constexpr size_t size_of(DType dtype) {
  constexpr uint8_t sizes[kDTypeCount] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
  return sizes[static_cast<size_t>(dtype)];
}
// "f32", "bool", …: the names used in messages, in `chorale ops` and in files.
std::string_view name_of(DType dtype);
// The inverse; throws InvalidArgument for an unknown name.
DType dtype_from_name(std::string_view name);
std::ostream& operator<<(std::ostream& out, DType dtype);

constexpr bool is_complex(DType t) { return t >= DType::kC64; }
constexpr bool is_floating(DType t) { return t >= DType::kF16 && t <= DType::kF64; }
constexpr bool is_half(DType t) { return t == DType::kF16 || t == DType::kBF16; }
constexpr bool is_integral(DType t) { return t >= DType::kU8 && t <= DType::kI64; }  // without bool
constexpr bool is_differentiable(DType t) { return t >= DType::kF16; }

// The dtype in which two tensors of these dtypes are combined (PyTorch's documented lattice: f16 with bf16 gives f32,
// u8 with a signed integer gives the next wider signed one, an integer never widens a floating type).
DType promote(DType a, DType b);
// The real type of a complex one's parts, and the complex type with parts of a real one; others are returned unchanged.
constexpr DType real_of(DType t) { return t == DType::kC64 ? DType::kF32 : t == DType::kC128 ? DType::kF64 : t; }
constexpr DType complex_of(DType t) { return t == DType::kF64 || t == DType::kC128 ? DType::kC128 : DType::kC64; }
// The type in which sums and transcendental functions of t are computed: f32 for the 16-bit types, else t.
constexpr DType compute_of(DType t) { return is_half(t) ? DType::kF32 : t; }

template <class T>
struct DTypeOf;
// clang-format off
#define CHORALE_FOR_EACH_DTYPE(X)                                                                  \
  X(bool, kBool) X(uint8_t, kU8) X(int8_t, kI8) X(int16_t, kI16) X(int32_t, kI32) X(int64_t, kI64) \
  X(::chorale::float16, kF16) X(::chorale::bfloat16, kBF16) X(float, kF32) X(double, kF64)         \
  X(::chorale::complex64, kC64) X(::chorale::complex128, kC128)
// clang-format on
#define CHORALE_DTYPE_OF(T, name)               \
  template <>                                   \
  struct DTypeOf<T> {                           \
    static constexpr DType value = DType::name; \
  };
CHORALE_FOR_EACH_DTYPE(CHORALE_DTYPE_OF)
#undef CHORALE_DTYPE_OF
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

namespace base {
// A type as a value, for the lambdas below: `using T = typename decltype(tag)::type;`.
template <class T>
struct TypeTag {
  using type = T;
};
}  // namespace base

// Calls f(TypeTag<T>{}) with the C++ type of dtype. The result type must not depend on T.
template <class F>
decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
#define CHORALE_VISIT(T, name) \
  case DType::name:            \
    return f(base::TypeTag<T>{});
    CHORALE_FOR_EACH_DTYPE(CHORALE_VISIT)
#undef CHORALE_VISIT
  }
  __builtin_unreachable();
}

}  // namespace chorale
