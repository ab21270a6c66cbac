// The pointwise operations that have vector loops: names, signatures and expression texts, all from scalar_ops.inc.
#pragma once

#include <cstdint>
#include <string_view>

#include "chorale/base/dtype.h"

namespace chorale::vec {

enum class ScalarOp : uint8_t {
#define CHORALE_SCALAR(Name, dtypes, inputs, ...) k##Name,
#define CHORALE_SCALAR_ALL
#include "chorale/vec/scalar_ops.inc"
#undef CHORALE_SCALAR_ALL
};

// What an operation takes and gives. "Same" is the dtype of the loop.
enum class ScalarKind : uint8_t {
  kSame,       // same, … -> same
  kPredicate,  // same, … -> bool
  kMasked,     // bool, same, … -> same
  kToReal,     // same -> real_of(same)
};

struct ScalarInfo {
  const char* name;    // "Tanh"
  const char* inputs;  // "(x)", "(a, b)"
  const char* text;    // "mul(dy, sub(1, mul(y, y)))"
  int input_count;
  ScalarKind kind;
  uint8_t dtypes;  // bits of domain
};

// Classes of dtypes, as bits of ScalarInfo::dtypes.
namespace domain {
inline constexpr uint8_t F = 1, I = 2, B = 4, C = 8;
constexpr uint8_t of(DType t) { return is_complex(t) ? C : t == DType::kBool ? B : is_integral(t) ? I : F; }
}  // namespace domain

inline constexpr int kScalarOpCount = 0
#define CHORALE_SCALAR(Name, dtypes, inputs, ...) +1
#define CHORALE_SCALAR_ALL
#include "chorale/vec/scalar_ops.inc"
#undef CHORALE_SCALAR_ALL
    ;

namespace detail {
using namespace domain;

// "(a, b)" has one comma more than none.
constexpr int count_inputs(const char* inputs) {
  int count = 1;
  for (; *inputs != '\0'; ++inputs) count += *inputs == ',' ? 1 : 0;
  return count;
}

inline constexpr ScalarInfo kInfo[] = {
#define CHORALE_INFO(Name, dtypes, inputs, kind, ...) \
  {#Name, #inputs, #__VA_ARGS__, count_inputs(#inputs), ScalarKind::kind, static_cast<uint8_t>(dtypes)},
#define CHORALE_SCALAR(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kSame, __VA_ARGS__)
#define CHORALE_PREDICATE(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kPredicate, __VA_ARGS__)
#define CHORALE_MASKED(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kMasked, __VA_ARGS__)
#define CHORALE_TO_REAL(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kToReal, __VA_ARGS__)
#define CHORALE_SCALAR_ALL
#include "chorale/vec/scalar_ops.inc"
#undef CHORALE_SCALAR_ALL
#undef CHORALE_INFO
};
}  // namespace detail

constexpr const ScalarInfo& info(ScalarOp op) { return detail::kInfo[static_cast<size_t>(op)]; }

}  // namespace chorale::vec
