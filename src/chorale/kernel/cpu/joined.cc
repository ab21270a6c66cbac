#include "chorale/kernel/cpu/joined.h"

#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/kernel/cpu/product/attention.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

// out = a + b, contiguous and of one dtype.
void add_up(const Tensor& a, const Tensor& b, const Tensor& out) {
  const void* both[] = {a.raw(), b.raw()};
  vec::pointwise_loop(vec::ScalarOp::kAdd, out.dtype())(both, out.raw(), out.elems(), {});
}
// Where the wide values of `narrow` are made: there itself, if it is wide.
Tensor wide_of(const Tensor& narrow, DType wide) {
  return narrow.dtype() == wide ? narrow : Tensor::empty(narrow.sizes(), wide);
}

}  // namespace

void add_layer_norm(const KernelArgs& args) {
  const Tensor& sum = args.out[0];
  const DType dtype = sum.dtype();
  add_up(contiguous(args.in[0]), contiguous(args.in[1], dtype), sum);
  const Tensor wide = wide_of(args.out[1], dtype);
  const Tensor in[] = {sum, args.in[2], args.in[3]};
  Tensor out[] = {wide, args.out[2], args.out[3]};
  layer_norm({in, out, args.attrs, args.stream});
  if (!wide.is(args.out[1])) copy_into(wide, args.out[1]);
}

void add_layer_norm_backward(const KernelArgs& args) {
  const Tensor& dx = args.out[0];
  const Tensor in[] = {contiguous(args.in[1], dx.dtype()), args.in[2], args.in[3], args.in[4], args.in[5]};
  Tensor out[] = {Tensor::empty(dx.sizes(), dx.dtype()), args.out[2], args.out[3]};
  layer_norm_backward({in, out, args.attrs, args.stream});
  add_up(contiguous(args.in[0]), out[0], dx);
  copy_into(dx, args.out[1]);
}

void attention_backward_joined(const KernelArgs& args) {
  const Tensor& all = args.out[0];
  Tensor parts[3];
  for (int64_t i = 0; i < 3; ++i) {
    const Shape sizes = {all.size(0), all.size(3), all.size(1), all.size(4)};
    parts[i] = all.view_as(sizes, {all.stride(0), all.stride(3), all.stride(1), all.stride(4)},
                           all.offset() + i * all.stride(2));
  }
  attention_backward({args.in, parts, args.attrs, args.stream});
}

}  // namespace chorale::kernel::cpu
