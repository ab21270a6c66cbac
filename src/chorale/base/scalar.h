// A number that is not a tensor: an operand or an attribute. It remembers its category, because a scalar promotes a
// tensor's dtype only when its category is higher (bool < integer < floating < complex).
#pragma once

#include <concepts>
#include <iosfwd>

#include "chorale/base/dtype.h"

namespace chorale {

class Scalar {
 public:
  enum class Kind : int64_t { kBool, kInt, kFloat, kComplex };

  constexpr Scalar() : Scalar(int64_t{0}) {}
  template <class T>
    requires std::integral<T>
  constexpr Scalar(T value)  // NOLINT(google-explicit-constructor)
      : kind_(std::same_as<T, bool> ? Kind::kBool : Kind::kInt),
        integer_(static_cast<int64_t>(value)),
        real_(static_cast<double>(value)) {}
  template <class T>
    requires std::floating_point<T>
  constexpr Scalar(T value) : kind_(Kind::kFloat), real_(static_cast<double>(value)) {}  // NOLINT
  template <class T>
  constexpr Scalar(std::complex<T> value)  // NOLINT(google-explicit-constructor)
      : kind_(Kind::kComplex), real_(static_cast<double>(value.real())), imag_(static_cast<double>(value.imag())) {}

  Kind kind() const { return kind_; }
  double real() const { return real_; }
  double imag() const { return imag_; }
  // Exact for integers; truncates otherwise (saturating: no undefined conversions).
  int64_t integer() const;
  bool is_zero() const { return real_ == 0 && imag_ == 0; }

  // The value as an element of a tensor.
  template <class T>
  T to() const {
    if constexpr (std::same_as<T, bool>) {
      return !is_zero();
    } else if constexpr (std::integral<T>) {
      return static_cast<T>(integer());
    } else if constexpr (std::same_as<T, float16> || std::same_as<T, bfloat16>) {
      return T(static_cast<float>(real_));
    } else if constexpr (std::floating_point<T>) {
      return static_cast<T>(real_);
    } else {
      return T(static_cast<typename T::value_type>(real_), static_cast<typename T::value_type>(imag_));
    }
  }
  friend bool operator==(const Scalar& a, const Scalar& b) {
    return a.kind_ == b.kind_ && a.integer_ == b.integer_ && a.real_ == b.real_ && a.imag_ == b.imag_;
  }

 private:
  Kind kind_;
  int64_t integer_ = 0;
  double real_ = 0;
  double imag_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Scalar& scalar);

// The dtype of `tensor` combined with a scalar of this category.
DType promote(DType tensor, Scalar::Kind scalar);

}  // namespace chorale
