// The scalar expressions of scalar_ops.inc as values: what a fuser joins, a renderer turns into text of another
// language, and a reader evaluates. They are read from the same text that the vector loops are compiled from.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string_view>
#include <vector>

#include "chorale/vec/scalar_ops.h"

namespace chorale::vec {

// One step of an expression.
struct Term {
  enum class Kind : uint8_t {
    kInput,   // operand `index` of the operation
    kParam,   // number `index` among the call's attributes
    kNumber,  // the literal `number`
    kCall,    // `function`, a word of the vocabulary, of the terms `args`
  };
  Kind kind;
  uint8_t index = 0;
  uint8_t arg_count = 0;
  uint8_t args[3] = {};  // places in Expression::terms, all before this one
  double number = 0;
  std::string_view function{};
};

// Terms in an order in which they can be computed; the last one is the result. Equal parts of the text are one term.
struct Expression {
  std::vector<Term> terms;
};

const Expression& expression_of(ScalarOp op);
// "mul(dy, sub(1, mul(y, y)))"
inline std::string_view text_of(ScalarOp op) { return info(op).text; }

}  // namespace chorale::vec
