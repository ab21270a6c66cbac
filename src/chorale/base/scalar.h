// A number that is not a tensor: an operand or an attribute. It remembers its category, because a scalar promotes a
// tensor's dtype only when its category is higher (bool < integer < floating < complex).
#pragma once

#include <bit>
#include <concepts>
#include <iosfwd>
#include <string>
#include <utility>

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
        real_(static_cast<double>(value)) {
    if constexpr (!std::same_as<T, bool>) {
      CHORALE_CHECK(std::in_range<int64_t>(value), "[scalar] ", value, " does not fit into i64");
    }
  }
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

  // The value as an element of a tensor. Integers wrap around when T is too narrow; complex numbers lose their
  // imaginary part when T is real.
  template <class T>
  T to() const {
    if constexpr (std::same_as<T, bool>) {
      return !is_zero();
    } else if constexpr (std::integral<T>) {
      return static_cast<T>(integer());
    } else if constexpr (std::same_as<T, float16> || std::same_as<T, bfloat16>) {
      return T(to<float>());
    } else if constexpr (std::floating_point<T>) {
      // An integer is rounded once, not to double and then again.
      return kind_ <= Kind::kInt ? static_cast<T>(integer_) : static_cast<T>(real_);
    } else {
      return T(to<typename T::value_type>(), static_cast<typename T::value_type>(imag_));
    }
  }
  // Same category and same bits: NaN equals itself, 0.0 and -0.0 differ. A cache of results by their attributes
  // needs that.
  friend bool operator==(const Scalar& a, const Scalar& b) {
    return a.kind_ == b.kind_ && a.integer_ == b.integer_ && same_bits(a.real_, b.real_) && same_bits(a.imag_, b.imag_);
  }
  static bool same_bits(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

 private:
  Kind kind_;
  int64_t integer_ = 0;
  double real_ = 0;
  double imag_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Scalar& scalar);  // true, 3, 0.5, 3.0, 1.0-2.5j

// The fewest digits that read back as the same number, and always recognisable as floating: 1.0, 1e-05, nan, -inf.
std::string to_text(double value);

// The dtype of `tensor` combined with a scalar of this category.
DType promote(DType tensor, Scalar::Kind scalar);

}  // namespace chorale
