#include "chorale/kernel/cuda/product.h"

#include "chorale/device/cuda/space.h"
#include "chorale/kernel/batch_dims.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/product_engine.h"
#include "chorale/kernel/linalg_attrs.h"
#include "chorale/tensor/strided.h"

namespace chorale::cuda {
extern const std::string_view kProductCu;
}

namespace chorale::kernel::cuda {
namespace {

// A matrix, or several, that cuBLASLt can read.
Tensor readable(const Tensor& x, Stream stream) {
  return is_readable(x.size(-2), x.size(-1), x.stride(-2), x.stride(-1)) ? x : contiguous(x, stream);
}

void integer_products(const Tensor& a, const Tensor& b, const Tensor& c, int64_t alpha, int64_t beta, Stream stream) {
  // A walk over the batch alone; the matrices are seen through their first elements.
  const auto first = [&](const Tensor& x) {
    Shape sizes(x.sizes().begin(), x.sizes().end() - 2);
    Strides strides(x.strides().begin(), x.strides().end() - 2);
    return x.view_as(sizes, strides, x.offset());
  };
  const Tensor of_a = first(a), of_b = first(b), of_c = first(c);
  const vec::StridedView in[] = {strided(of_a), strided(of_b)};
  const chorale::cuda::Space space(vec::StridedSpace(strided(of_c), in), 3);
  launch(instance(stream, chorale::cuda::kProductCu, "integer_product", {c.dtype()}),
         {.x = blocks_for(stream.device, c.elems())}, stream, space, c.size(-2), c.size(-1), a.size(-1), a.stride(-2),
         a.stride(-1), b.stride(-2), b.stride(-1), alpha, beta);
}

bool is_integer(DType dtype) { return !is_differentiable(dtype); }

}  // namespace

void multiply(const Tensor& a_any, const Tensor& b_any, const Tensor& c, Stream stream, double alpha, double beta) {
  if (c.elems() == 0) return;
  const Tensor a = readable(a_any, stream), b = readable(b_any, stream);
  if (a.size(-1) == 0) return set_zero(c, stream);
  Product p{.dtype = a.dtype(),
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
            .alpha = alpha,
            .beta = beta,
            .c_dtype = c.dtype()};
  const BatchDims dims = batch_dims(a, b, c);
  const auto outer = take_inner_batch(p, dims, p.a_col == 1);
  for_each_batch(p, a.elem_bytes(), c.elem_bytes(), outer, [&](const Product& piece) { product(piece, stream); });
}

void matmul(const KernelArgs& args) {
  const Tensor& c = args.out[0];
  if (c.elems() == 0) return;
  if (is_integer(c.dtype())) return integer_products(args.in[0], args.in[1], c, 1, 0, args.stream);
  multiply(args.in[0], args.in[1], c, args.stream);
}

void addmm(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<AddmmAttrs>();
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const bool reads_c = !attrs.beta.is_zero();
  const Tensor& c = args.in[0];
  // One number for each column, added as it is: cuBLASLt does that while it writes the product.
  const bool is_bias = reads_c && attrs.beta.real() == 1 && attrs.beta.imag() == 0 && c.dims() == 1 &&
                       c.size(0) == out.size(1) && c.stride(0) == 1 && !is_integer(out.dtype()) &&
                       !is_complex(out.dtype()) && args.in[1].size(1) > 0;
  if (reads_c && !is_bias) {
    copy_into(c.view_as(out.sizes(), broadcast_strides(c.sizes(), c.strides(), out.sizes()), c.offset()), out,
              args.stream);
  }
  if (is_integer(out.dtype())) {
    return integer_products(args.in[1], args.in[2], out, attrs.alpha.integer(), attrs.beta.integer(), args.stream);
  }
  const Tensor a = readable(args.in[1], args.stream), b = readable(args.in[2], args.stream);
  if (a.size(1) == 0 && !reads_c) return set_zero(out, args.stream);
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
           .c_row = out.size(1),
           .alpha = attrs.alpha.real(),
           .beta = is_bias ? 0 : attrs.beta.real(),
           .bias = is_bias ? c.raw() : nullptr},
          args.stream);
}

void linear(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Tensor weight = readable(args.in[1], args.stream);
  Tensor x = args.in[0];
  Strides folded;
  const int64_t k = x.size(-1), rows = out.elems() / out.size(-1);
  if (!view_strides(x.sizes(), x.strides(), {rows, k}, folded) || !is_readable(rows, k, folded[0], folded[1])) {
    x = contiguous(x, args.stream);
    folded = {k, 1};
  }
  const Tensor bias = args.in[2].defined() ? contiguous(args.in[2], args.stream) : Tensor();
  // cuBLASLt adds a bias to real numbers only.
  const bool in_epilogue = bias.defined() && !is_complex(out.dtype()) && k > 0;
  if (bias.defined() && !in_epilogue) {
    copy_into(bias.view_as(out.sizes(), broadcast_strides(bias.sizes(), bias.strides(), out.sizes()), bias.offset()),
              out, args.stream);
  } else if (k == 0) {
    return set_zero(out, args.stream);
  }
  if (k == 0) return;
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
           .c_row = out.dims() > 1 ? out.stride(-2) : out.size(-1),
           .beta = bias.defined() && !in_epilogue ? 1.0 : 0.0,
           .bias = in_epilogue ? bias.raw() : nullptr},
          args.stream);
}

}  // namespace chorale::kernel::cuda
