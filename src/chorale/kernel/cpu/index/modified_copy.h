// Ops that return their first input with some elements changed: scatter, index_add, ….
#pragma once

#include "chorale/kernel/cpu/support/copy.h"

namespace chorale::kernel::cpu {

// Runs body(work) on contiguous memory of `compute` that holds the values of x, and sees to it that the result ends up
// in `out`: which may be x itself, then nothing is copied, and may have any layout and dtype.
template <class F>
void modify(const Tensor& x, const Tensor& out, DType compute, F&& body) {
  const bool direct = out.is_contiguous() && out.dtype() == compute;
  const Tensor work = direct ? out : Tensor::empty(out.sizes(), compute);
  if (!(direct && work.raw() == x.raw())) copy_into(x, work);
  body(work);
  if (!direct) copy_into(work, out);
}

// x, or a copy of it where writing to `out` would change it.
inline Tensor apart(const Tensor& x, const Tensor& out) {
  if (!x.overlaps(out)) return x;
  const Tensor copy = Tensor::empty(x.sizes(), x.dtype());
  copy_into(x, copy);
  return copy;
}

}  // namespace chorale::kernel::cpu
