// Attributes of reductions, scans and order, and what "these dimensions" means.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// Dimensions as a bit mask.
using DimMask = uint32_t;

// The dimensions, among `of` of them, that a list names: negative ones count from the end, an empty list means all. A
// scalar may be reduced over dimension 0. Throws InvalidArgument, naming `op`, for a dimension out of range or named
// twice.
DimMask dim_mask(const char* op, const IntList& dims, int64_t of);

// The shape that remains of `sizes`: reduced dimensions have size 1 (keepdim) or are gone.
Shape reduced_shape(const Shape& sizes, DimMask reduced, bool keepdim);

// How many elements become one.
int64_t reduced_count(const Shape& sizes, DimMask reduced);

struct ReduceAttrs {
  IntList dims;  // empty: all
  bool keepdim = false;
};
CHORALE_FIELDS(ReduceAttrs, dims, keepdim)

// A reduction along one dimension, which says where it found something.
struct PickAttrs {
  int64_t dim = 0;
  bool keepdim = false;
};
CHORALE_FIELDS(PickAttrs, dim, keepdim)

struct ArgAttrs {
  int64_t dim = 0;
  bool flat = false;  // over all dimensions instead; the index is that in the flattened tensor
  bool keepdim = false;
};
CHORALE_FIELDS(ArgAttrs, dim, flat, keepdim)

struct NormAttrs {
  double p = 2;
  IntList dims;
  bool keepdim = false;
};
CHORALE_FIELDS(NormAttrs, p, dims, keepdim)

struct VarAttrs {
  IntList dims;
  double correction = 1;  // the sum of squares is divided by count - correction
  bool keepdim = false;
};
CHORALE_FIELDS(VarAttrs, dims, correction, keepdim)

// Running results along one dimension.
struct ScanAttrs {
  int64_t dim = 0;
  bool reverse = false;    // from the last element to the first
  bool exclusive = false;  // each result leaves out its own element
};
CHORALE_FIELDS(ScanAttrs, dim, reverse, exclusive)

}  // namespace chorale::kernel
