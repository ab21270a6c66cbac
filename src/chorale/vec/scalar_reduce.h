// Inside vec: what a reduction does with one element, for every dtype. The definition that vector loops are tested
// against.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "chorale/vec/loops.h"

// Inlined into loops for several instruction sets; a shared copy out of line must never exist.
#define CHORALE_INLINE [[gnu::always_inline]]

namespace chorale::vec {

template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<std::complex<T>> = true;
template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>;

// bool as its byte: a stray value other than 0 and 1 stays harmless.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>;

// The product of two numbers, rounded before anything is added to it. GCC 12's vectorizer fuses the two steps of a
// complex product even under -ffp-contract=off, and results would depend on where a loop is cut.
template <class T>
CHORALE_INLINE inline T rounded_product(T a, T b) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(a * b);
#else
  return a * b;
#endif
}
template <class T>
CHORALE_INLINE inline std::complex<T> complex_product(std::complex<T> a, std::complex<T> b) {
  return {rounded_product(a.real(), b.real()) - rounded_product(a.imag(), b.imag()),
          rounded_product(a.real(), b.imag()) + rounded_product(a.imag(), b.real())};
}

template <class T>
struct RealOf {
  using type = T;
};
template <class T>
struct RealOf<std::complex<T>> {
  using type = T;
};

constexpr bool is_logical(ReduceOp op) { return op == ReduceOp::kAny || op == ReduceOp::kAll; }
constexpr bool is_extremum(ReduceOp op) { return op == ReduceOp::kMax || op == ReduceOp::kMin; }
constexpr bool is_of_magnitudes(ReduceOp op) {
  return op == ReduceOp::kSumSquares || op == ReduceOp::kSumAbs || op == ReduceOp::kMaxAbs || op == ReduceOp::kMinAbs;
}
constexpr bool is_defined(ReduceOp op, DType in) { return !(is_extremum(op) && is_complex(in)); }

constexpr DType accumulator_dtype(ReduceOp op, DType in) {
  if (is_logical(op)) return DType::kBool;
  if (op == ReduceOp::kSumNonZero) return DType::kI64;
  if (is_half(in)) return DType::kF32;
  if (is_floating(in)) return in;
  if (is_complex(in)) return is_of_magnitudes(op) ? real_of(in) : in;
  return is_extremum(op) ? in : DType::kI64;
}

template <DType kDType>
struct TypeOf;
#define CHORALE_TYPE_OF(T, name) \
  template <>                    \
  struct TypeOf<DType::name> {   \
    using type = T;              \
  };
CHORALE_FOR_EACH_DTYPE(CHORALE_TYPE_OF)
#undef CHORALE_TYPE_OF

template <class T>
CHORALE_INLINE inline bool is_nonzero(T x) {
  if constexpr (kIsComplex<T>) {
    return (int{x.real() != 0} | int{x.imag() != 0}) != 0;  // no branch
  } else if constexpr (kIsHalf<T>) {
    return (x.bits & 0x7fff) != 0;
  } else {
    return x != T(0);
  }
}

template <ReduceOp kOp, class T>
struct ScalarReduce {
  using In = Stored<T>;
  using Acc = Stored<typename TypeOf<accumulator_dtype(kOp, dtype_of<T>)>::type>;

  static Acc identity() {
    using Limits = std::numeric_limits<Acc>;
    constexpr bool kFloat = std::is_floating_point_v<Acc>;
    switch (kOp) {
      case ReduceOp::kProd:
      case ReduceOp::kAll:
        return Acc(1);
      case ReduceOp::kMax:
        return kFloat ? -Limits::infinity() : std::is_same_v<T, bool> ? Acc(0) : Limits::lowest();
      case ReduceOp::kMin:
        return kFloat ? Limits::infinity() : std::is_same_v<T, bool> ? Acc(1) : Limits::max();
      case ReduceOp::kMinAbs:
        return kFloat ? Limits::infinity() : Limits::max();
      default:
        return Acc(0);
    }
  }

  CHORALE_INLINE static Acc step(Acc acc, In x) {
    if constexpr (kIsHalf<T> && !is_logical(kOp) && kOp != ReduceOp::kSumNonZero) {
      return ScalarReduce<kOp, float>::step(acc, static_cast<float>(x));
    } else if constexpr (is_logical(kOp) || kOp == ReduceOp::kSumNonZero) {
      return combine(acc, static_cast<Acc>(is_nonzero(x)));
    } else if constexpr (kOp == ReduceOp::kSumSquares) {
      if constexpr (kIsComplex<T>) {
        return acc + x.real() * x.real() + x.imag() * x.imag();
      } else {
        return combine(acc, times(static_cast<Acc>(x), static_cast<Acc>(x)));
      }
    } else if constexpr (is_of_magnitudes(kOp)) {
      return combine(acc, magnitude(x));
    } else {
      return combine(acc, static_cast<Acc>(x));
    }
  }

  CHORALE_INLINE static Acc combine(Acc a, Acc b) {
    if constexpr (kOp == ReduceOp::kProd) {
      return times(a, b);
    } else if constexpr (kOp == ReduceOp::kAny) {
      return a | b;
    } else if constexpr (kOp == ReduceOp::kAll) {
      return a & b;
    } else if constexpr (kOp == ReduceOp::kMax || kOp == ReduceOp::kMaxAbs) {
      return a != a ? a : b > a || b != b ? b : a;  // NaN wins; NOLINT(misc-redundant-expression)
    } else if constexpr (kOp == ReduceOp::kMin || kOp == ReduceOp::kMinAbs) {
      return a != a ? a : b < a || b != b ? b : a;  // NOLINT(misc-redundant-expression)
    } else if constexpr (std::is_integral_v<Acc>) {
      return static_cast<Acc>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));  // wraps around
    } else {
      return a + b;
    }
  }

 private:
  CHORALE_INLINE static Acc times(Acc a, Acc b) {
    if constexpr (kIsComplex<Acc>) {
      return complex_product(a, b);
    } else if constexpr (std::is_integral_v<Acc>) {
      return static_cast<Acc>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
  CHORALE_INLINE static Acc magnitude(In x) {
    if constexpr (kIsComplex<T> || std::is_floating_point_v<T>) {
      return std::abs(x);
    } else {
      const auto wide = static_cast<int64_t>(x);
      return static_cast<Acc>(wide < 0 ? 0 - static_cast<uint64_t>(wide) : static_cast<uint64_t>(wide));
    }
  }
};

#define CHORALE_FOR_EACH_REDUCE_OP(X) \
  X(kSum) X(kProd) X(kMax) X(kMin) X(kSumSquares) X(kSumAbs) X(kMaxAbs) X(kMinAbs) X(kSumNonZero) X(kAny) X(kAll)

}  // namespace chorale::vec
