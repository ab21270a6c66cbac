#include "chorale/kernel/cpu/support/copy.h"

#include "chorale/base/error.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/strided_copy.h"

namespace chorale::kernel::cpu {

void copy_into(const Tensor& from, const Tensor& to) {
  CHORALE_INVARIANT(from.sizes() == to.sizes(), "copy of ", from.sizes(), " into ", to.sizes());
  vec::copy_strided(strided(from), strided(to));
}

Tensor contiguous(const Tensor& x) { return contiguous(x, x.dtype()); }

Tensor contiguous(const Tensor& x, DType dtype) {
  if (x.is_contiguous() && x.dtype() == dtype) return x;
  const Tensor copy = Tensor::empty(x.sizes(), dtype, x.device());
  copy_into(x, copy);
  return copy;
}

void copy(const KernelArgs& args) { copy_into(args.in[0], args.out[0]); }
void copy_each(const KernelArgs& args) {
  for (size_t i = 0; i < args.in.size(); ++i) copy_into(args.in[i], args.out[i]);
}

}  // namespace chorale::kernel::cpu
