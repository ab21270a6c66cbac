#include "chorale/base/scalar.h"

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
      return out << scalar.real();
    case Scalar::Kind::kComplex:
      return out << '(' << scalar.real() << (std::signbit(scalar.imag()) ? "" : "+") << scalar.imag() << "j)";
  }
  return out;
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
