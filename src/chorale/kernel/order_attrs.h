// Attributes of sorting and counting.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

struct SortAttrs {
  int64_t dim = -1;
  bool descending = false;
};
CHORALE_FIELDS(SortAttrs, dim, descending)

struct TopkAttrs {
  int64_t k = 1;
  int64_t dim = -1;
  bool largest = true;
};
CHORALE_FIELDS(TopkAttrs, k, dim, largest)

struct UniqueAttrs {
  bool inverse = false;
  bool counts = false;
};
CHORALE_FIELDS(UniqueAttrs, inverse, counts)

struct SearchAttrs {
  bool right = false;
};
CHORALE_FIELDS(SearchAttrs, right)

struct BincountAttrs {
  int64_t minlength = 0;
};
CHORALE_FIELDS(BincountAttrs, minlength)

}  // namespace chorale::kernel
