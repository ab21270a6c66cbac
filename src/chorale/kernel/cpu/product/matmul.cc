#include "chorale/kernel/cpu/product/matmul.h"

#include "chorale/kernel/batch_dims.h"
#include "chorale/kernel/cpu/product/product_engine.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/linalg_attrs.h"

namespace chorale::kernel::cpu {

void matmul(const KernelArgs& args) {
  const Tensor &a = args.in[0], &b = args.in[1], &c = args.out[0];
  if (c.elems() == 0) return;
  Product p{.dtype = c.dtype(),
            .m = c.size(-2),
            .n = c.size(-1),
            .k = a.size(-1),
            .a = a.raw(),
            .b = b.raw(),
            .c = c.raw(),
            .a_row = a.stride(-2),
            .a_col = a.stride(-1),
            .b_row = b.stride(-2),
            .b_col = b.stride(-1),
            .c_row = c.stride(-2),
            .c_col = c.stride(-1)};
  const BatchDims dims = batch_dims(a, b, c);
  const auto outer = take_inner_batch(p, dims);
  for_each_batch(p, a.elem_bytes(), c.elem_bytes(), outer, [](const Product& piece) { product(piece); });
}

void addmm(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AddmmAttrs>();
  const Tensor &a = args.in[1], &b = args.in[2], &out = args.out[0];
  if (out.elems() == 0) return;
  const bool reads_c = !attrs.beta.is_zero();
  if (reads_c) {
    const Tensor& c = args.in[0];
    copy_into(c.view_as(out.sizes(), broadcast_strides(c.sizes(), c.strides(), out.sizes()), c.offset()), out);
  }
  product({.dtype = out.dtype(),
           .m = out.size(0),
           .n = out.size(1),
           .k = a.size(1),
           .a = a.raw(),
           .b = b.raw(),
           .c = out.raw(),
           .a_row = a.stride(0),
           .a_col = a.stride(1),
           .b_row = b.stride(0),
           .b_col = b.stride(1),
           .c_row = out.stride(0),
           .c_col = out.stride(1),
           .alpha = attrs.alpha.real(),
           .beta = attrs.beta.real()});
}

void linear(const KernelArgs& args) {
  const Tensor &weight = args.in[1], &out = args.out[0];
  if (out.elems() == 0) return;
  // The rows of x as one matrix: without a copy where its leading dimensions walk on with one step.
  Tensor x = args.in[0];
  Strides folded;
  const int64_t k = x.size(-1), rows = out.elems() / out.size(-1);
  if (!view_strides(x.sizes(), x.strides(), {rows, k}, folded)) {
    x = contiguous(x);
    folded = {k, 1};
  }
  Tensor bias = args.in[2];
  // Products of complex numbers add to what is there; those of real numbers take a bias on the way out.
  const bool adds_to_bias = bias.defined() && is_complex(out.dtype());
  if (adds_to_bias) {
    copy_into(bias.view_as(out.sizes(), broadcast_strides(bias.sizes(), bias.strides(), out.sizes()), bias.offset()),
              out);
    bias = Tensor();
  }
  if (bias.defined()) bias = contiguous(bias);
  product({.dtype = out.dtype(),
           .m = rows,
           .n = out.size(-1),
           .k = k,
           .a = x.raw(),
           .b = weight.raw(),
           .c = out.raw(),
           .a_row = folded[0],
           .a_col = folded[1],
           .b_row = weight.stride(1),
           .b_col = weight.stride(0),
           .c_row = out.size(-1),
           .c_col = 1,
           .bias = bias.defined() ? bias.raw() : nullptr,
           .beta = adds_to_bias ? 1.0 : 0.0});
}

}  // namespace chorale::kernel::cpu
