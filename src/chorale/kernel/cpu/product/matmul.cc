#include "chorale/kernel/cpu/product/matmul.h"

#include "chorale/kernel/cpu/product/product_engine.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/linalg_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// One dimension of the batch, and the steps of each operand along it.
struct BatchDim {
  int64_t size, a, b, c;
};

// Batch dimensions from the inside out, merged where all three operands walk on with one step.
SmallVector<BatchDim, 6> batch_dims(const Tensor& a, const Tensor& b, const Tensor& c) {
  SmallVector<BatchDim, 6> dims;
  const auto step = [&](const Tensor& x, int64_t d) -> int64_t {  // d counts from the last batch dimension
    const int64_t at = x.dims() - 3 - d;
    return at < 0 || x.sizes()[static_cast<size_t>(at)] == 1 ? 0 : x.strides()[static_cast<size_t>(at)];
  };
  for (int64_t d = 0; d < c.dims() - 2; ++d) {
    const BatchDim dim{c.sizes()[static_cast<size_t>(c.dims() - 3 - d)], step(a, d), step(b, d), step(c, d)};
    if (dim.size == 1) continue;
    if (!dims.empty()) {
      BatchDim& inner = dims.back();
      if (dim.a == inner.a * inner.size && dim.b == inner.b * inner.size && dim.c == inner.c * inner.size) {
        inner.size *= dim.size;
        continue;
      }
    }
    dims.push_back(dim);
  }
  return dims;
}

void run_batches(Product p, const Tensor& a, const Tensor& b, const Tensor& c, std::span<const BatchDim> outer) {
  if (outer.empty()) return product(p);
  const BatchDim& dim = outer.back();
  for (int64_t i = 0; i < dim.size; ++i) {
    Product piece = p;
    const auto bytes = static_cast<int64_t>(a.elem_bytes());
    piece.a = static_cast<const std::byte*>(p.a) + i * dim.a * bytes;
    piece.b = static_cast<const std::byte*>(p.b) + i * dim.b * bytes;
    piece.c = static_cast<std::byte*>(p.c) + i * dim.c * bytes;
    run_batches(piece, a, b, c, outer.first(outer.size() - 1));
  }
}

}  // namespace

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
  const auto dims = batch_dims(a, b, c);
  std::span<const BatchDim> outer(dims.data(), dims.size());
  if (!outer.empty()) {
    const BatchDim& inner = outer.front();
    if (inner.b == 0 && inner.a == p.m * p.a_row && inner.c == p.m * p.c_row) {
      p.m *= inner.size;  // one matrix b for all of them: their rows are the rows of one tall matrix
    } else {
      p.batch = inner.size;
      p.a_batch = inner.a;
      p.b_batch = inner.b;
      p.c_batch = inner.c;
    }
    outer = outer.subspan(1);
  }
  run_batches(p, a, b, c, outer);
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
