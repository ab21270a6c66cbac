// What several ranks hold becomes one: element i of every source is combined, and every destination gets the result.
#pragma once

#include <cstdint>
#include <span>

#include "chorale/base/dtype.h"
#include "chorale/base/reduce.h"

namespace chorale::vec {

// Note [Order of sums]
// Sources are combined along one fixed binary tree: the left branch takes the largest power of two below the number of
// sources, the right branch the rest. It depends on nothing but that number, so threads, processes and hosts that
// combine the same values get the same bits, however they cut the data. f16 and bf16 are combined in f32 and rounded
// once, at the end.

// False where the combination makes no sense: anything but a sum or an average of complex numbers, the average of
// integers or bool, bit operations on floating numbers. For bool a sum or maximum is a logical or, a product or minimum
// a logical and.
bool can_combine(Reduce op, DType dtype);

// All sources and destinations hold n elements. A destination may be one of the sources; other overlaps are not
// allowed. A factor other than 1 multiplies every source first (sums of floating and complex numbers only). An average
// divides by the number of sources, or by `average_of` where they are sums of several values already.
void combine(Reduce op, DType dtype, std::span<const void* const> sources, std::span<void* const> destinations,
             int64_t n, double factor = 1, size_t average_of = 0);

}  // namespace chorale::vec
