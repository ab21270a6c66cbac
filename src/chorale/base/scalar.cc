#include "chorale/base/scalar.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <ostream>

namespace chorale {

int64_t Scalar::integer() const {
  if (kind_ <= Kind::kInt) return integer_;
  if (std::isnan(real_)) return 0;
  if (real_ >= 0x1p63) return std::numeric_limits<int64_t>::max();
  if (real_ < -0x1p63) return std::numeric_limits<int64_t>::min();
  return static_cast<int64_t>(real_);
}

std::ostream& operator<<(std::ostream& out, const Scalar& scalar) {
  switch (scalar.kind()) {
    case Scalar::Kind::kBool:
      return out << (scalar.integer() ? "true" : "false");
    case Scalar::Kind::kInt:
      return out << scalar.integer();
    case Scalar::Kind::kFloat:
      return out << to_text(scalar.real());
    case Scalar::Kind::kComplex:
      return out << to_text(scalar.real()) << (std::signbit(scalar.imag()) ? "" : "+") << to_text(scalar.imag()) << 'j';
  }
  return out;
}

std::string to_text(double value) {
  if (std::isnan(value)) return "nan";  // without a sign
  char text[32];
  const auto result = std::to_chars(text, text + sizeof(text), value);
  std::string digits(text, result.ptr);
  if (std::isfinite(value) && digits.find_first_of(".e") == std::string::npos) digits += ".0";
  return digits;
}

DType promote(DType tensor, Scalar::Kind scalar) {
  switch (scalar) {
    case Scalar::Kind::kBool:
      return tensor;
    case Scalar::Kind::kInt:
      return tensor == DType::kBool ? DType::kI64 : tensor;
    case Scalar::Kind::kFloat:
      return is_differentiable(tensor) ? tensor : DType::kF32;
    case Scalar::Kind::kComplex:
      return is_complex(tensor) ? tensor : complex_of(tensor);
  }
  return tensor;
}

}  // namespace chorale
