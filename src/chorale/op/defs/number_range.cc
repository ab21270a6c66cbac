#include "chorale/op/defs/number_range.h"

#include <cmath>
#include <limits>
#include <utility>

namespace chorale::op {
namespace {

// The largest number of a floating type, or of the parts of a complex one.
double largest_finite(DType dtype) {
  switch (real_of(dtype)) {
    case DType::kF16:
      return 65504;
    case DType::kBF16:
      return 0x1.fep127;
    case DType::kF32:
      return static_cast<double>(std::numeric_limits<float>::max());
    default:
      return std::numeric_limits<double>::max();
  }
}

// Rounding may still lead to the largest one.
bool stays_finite(DType dtype, double value) {
  if (!std::isfinite(value)) return true;
  switch (real_of(dtype)) {
    case DType::kF16:
      return std::isfinite(static_cast<float>(float16(static_cast<float>(value))));
    case DType::kBF16:
      return std::isfinite(static_cast<float>(bfloat16(static_cast<float>(value))));
    case DType::kF32:
      return std::isfinite(static_cast<float>(value));
    default:
      return true;
  }
}

}  // namespace

bool can_hold(DType dtype, const Scalar& number) {
  if (is_differentiable(dtype)) return stays_finite(dtype, number.real()) && stays_finite(dtype, number.imag());
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      if (number.kind() <= Scalar::Kind::kInt) return std::in_range<T>(number.integer());
      return number.real() > static_cast<double>(std::numeric_limits<T>::min()) - 1 &&
             number.real() < static_cast<double>(std::numeric_limits<T>::max()) + 1;
    }
    return true;
  });
}

Scalar nearest_held(DType dtype, const Scalar& number) {
  if (can_hold(dtype, number) || number.kind() == Scalar::Kind::kComplex) return number;
  if (is_differentiable(dtype)) return std::copysign(largest_finite(dtype), number.real());
  return visit_dtype(dtype, [&](auto tag) -> Scalar {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      return number.real() < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
    }
    return number;
  });
}

void check_held(const char* op, DType dtype, const Scalar& number) {
  CHORALE_CHECK(can_hold(dtype, number), "[", op, "] a tensor of ", dtype, " cannot hold ", number,
                "; cast the tensor to a wider dtype first, or give the nearest number that it holds, ",
                nearest_held(dtype, number));
}

void check_operand_held(const char* op, DType dtype, const Scalar& number) {
  CHORALE_CHECK(can_hold(dtype, number), "[", op, "] a tensor of ", dtype, " cannot hold ", number,
                "; cast the tensor to a wider dtype first");
}

int64_t largest_exact_integer(DType dtype) {
  switch (real_of(dtype)) {
    case DType::kF16:
      return int64_t{1} << 11;
    case DType::kBF16:
      return int64_t{1} << 8;
    case DType::kF32:
      return int64_t{1} << 24;
    case DType::kF64:
      return int64_t{1} << 53;
    default:
      return visit_dtype(dtype, [](auto tag) -> int64_t {
        using T = typename decltype(tag)::type;
        if constexpr (std::is_integral_v<T>) return static_cast<int64_t>(std::numeric_limits<T>::max());
        return 0;
      });
  }
}

}  // namespace chorale::op
