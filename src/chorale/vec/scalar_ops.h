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

const ScalarInfo& info(ScalarOp op);
inline const char* text(ScalarOp op) { return info(op).text; }

}  // namespace chorale::vec
