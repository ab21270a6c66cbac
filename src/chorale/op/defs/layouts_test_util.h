// The same elements in other layouts.
#pragma once

#include <vector>

#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/view.h"

namespace chorale {

// Layouts that kernels treat differently: contiguous, first dimension contiguous, every other element.
inline std::vector<Tensor> layouts(const Tensor& x) {
  std::vector<Tensor> result{x};
  IntList backwards;
  for (int64_t d = x.dims(); d-- > 0;) backwards.values[backwards.count++] = d;
  result.push_back(permute(clone(permute(x, backwards)), backwards));  // the first dimension is contiguous
  if (x.dims() > 0) {
    Shape wide = x.sizes();
    wide.back() *= 2;
    const Tensor spaced = slice(zeros(wide, x.dtype()), -1, 0, kEnd, 2);  // every other element
    copy_(spaced, x);
    result.push_back(spaced);
  }
  return result;
}

}  // namespace chorale
