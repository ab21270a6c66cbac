// Each operation of the selected section of scalar_ops.inc as a struct: apply() is its expression, for whatever the
// vocabulary in scope is defined. Read once per target.
#if defined(CHORALE_VEC_SCALAR_STRUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_SCALAR_STRUCTS_INL_H_
#undef CHORALE_VEC_SCALAR_STRUCTS_INL_H_
#else
#define CHORALE_VEC_SCALAR_STRUCTS_INL_H_
#endif

#include <string_view>

#include "hwy/highway.h"

#include "chorale/vec/scalar_ops.h"

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE::scalar_op {

constexpr bool is_simple(std::string_view expression) {
  for (std::string_view word : {"exp", "log", "sin(", "cos(", "tan", "erf(", "normal_cdf(", "pow(", "sigmoid(",
                                "remainder(", "floor_divide("}) {
    if (expression.find(word) != std::string_view::npos) return false;
  }
  return true;
}

// (a, b) -> const auto a, const auto b
#define CHORALE_FORMALS_1(a) const auto a
#define CHORALE_FORMALS_2(a, b) const auto a, const auto b
#define CHORALE_FORMALS_3(a, b, c) const auto a, const auto b, const auto c
#define CHORALE_FOURTH(a, b, c, fourth, ...) fourth
#define CHORALE_FORMALS(...) \
  CHORALE_FOURTH(__VA_ARGS__, CHORALE_FORMALS_3, CHORALE_FORMALS_2, CHORALE_FORMALS_1, )(__VA_ARGS__)
#define CHORALE_COUNT(...) CHORALE_FOURTH(__VA_ARGS__, 3, 2, 1, )

#define CHORALE_STRUCT(kind, Name, dtypes, inputs, ...)                                          \
  struct Name {                                                                                  \
    static constexpr size_t kInputs = CHORALE_COUNT inputs;                                      \
    static constexpr ScalarKind kKind = ScalarKind::kind;                                        \
    static constexpr bool kIsSimple = is_simple(#__VA_ARGS__);                                   \
    static constexpr uint8_t dtype_bits() {                                                      \
      using namespace domain;                                                                    \
      return static_cast<uint8_t>(dtypes);                                                       \
    }                                                                                            \
    static HWY_INLINE auto apply(CHORALE_FORMALS inputs, [[maybe_unused]] const auto p0,         \
                                 [[maybe_unused]] const auto p1, [[maybe_unused]] const auto p2, \
                                 [[maybe_unused]] const auto p3) {                               \
      return __VA_ARGS__;                                                                        \
    }                                                                                            \
  };
#define CHORALE_SCALAR(...) CHORALE_STRUCT(kSame, __VA_ARGS__)
#define CHORALE_PREDICATE(...) CHORALE_STRUCT(kPredicate, __VA_ARGS__)
#define CHORALE_MASKED(...) CHORALE_STRUCT(kMasked, __VA_ARGS__)
#define CHORALE_TO_REAL(...) CHORALE_STRUCT(kToReal, __VA_ARGS__)
#include "chorale/vec/scalar_ops.inc"
#undef CHORALE_STRUCT
#undef CHORALE_FORMALS_1
#undef CHORALE_FORMALS_2
#undef CHORALE_FORMALS_3
#undef CHORALE_FORMALS
#undef CHORALE_FOURTH
#undef CHORALE_COUNT

}  // namespace chorale::vec::HWY_NAMESPACE::scalar_op
HWY_AFTER_NAMESPACE();

#endif
