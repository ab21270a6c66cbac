// Inside op/defs: numbers that a tensor's dtype cannot hold. They are an error where they would be stored, and become
// the nearest number that it holds where they are a bound; they never wrap around.
#pragma once

#include "chorale/base/scalar.h"

namespace chorale::op {

// An integer in the range of an integral dtype (fractions are cut off), a finite number that stays finite in a floating
// one. Any number is true or false.
bool can_hold(DType dtype, const Scalar& number);
// The number itself, or the nearest that the dtype holds.
Scalar nearest_held(DType dtype, const Scalar& number);
// InvalidArgument, naming the op, unless it can be held.
void check_held(const char* op, DType dtype, const Scalar& number);
// The same for a number that is computed with, where its value modulo the dtype's range will not do.
void check_operand_held(const char* op, DType dtype, const Scalar& number);
// The largest whole number up to which the dtype holds all of them.
int64_t largest_exact_integer(DType dtype);

}  // namespace chorale::op
