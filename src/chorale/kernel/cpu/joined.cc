#include "chorale/kernel/cpu/joined.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "chorale/kernel/cpu/loss/loss.h"
#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/kernel/cpu/product/attention.h"
#include "chorale/kernel/cpu/reduce/reduce.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/joined_heads.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

// Operands without gaps that lie alike, of one dtype.
void run_dense(vec::ScalarOp op, std::initializer_list<const Tensor*> in, const Tensor& out) {
  const void* data[2] = {};
  std::transform(in.begin(), in.end(), data, [](const Tensor* x) { return x->raw(); });
  vec::pointwise_loop(op, out.dtype())(data, out.raw(), out.elems(), {});
}
void add_up(const Tensor& a, const Tensor& b, const Tensor& out) { run_dense(vec::ScalarOp::kAdd, {&a, &b}, out); }
// x, or a copy that lies as `like` does.
Tensor lying_like(const Tensor& x, const Tensor& like) {
  if (x.strides() == like.strides()) return x;
  Tensor copy = Tensor::empty_strided(like.sizes(), like.strides(), like.dtype());
  copy_into(x, copy);
  return copy;
}
// Where the wide values of `narrow` are made: there itself, if it is wide.
Tensor wide_of(const Tensor& narrow, DType wide) {
  return narrow.dtype() == wide ? narrow : Tensor::empty(narrow.sizes(), wide);
}

// The sums of x's columns, of which `sums` says how many there are.
void sum_columns(const Tensor& x, std::span<Tensor> sums, Stream stream) {
  const int64_t columns = sums[0].elems(), rows = columns == 0 ? 0 : x.elems() / columns;
  const Tensor matrix = x.view_as({rows, columns}, {columns, 1}, x.offset());
  const Attrs over_rows = ReduceAttrs{IntList{0}, false};
  sum({{&matrix, 1}, sums, over_rows, stream});
}
// The gradient of an activation, and the sums of its columns.
void backward_summed(vec::ScalarOp op, const KernelArgs& args) {
  const Tensor dy = contiguous(args.in[0]), x = contiguous(args.in[1]);
  run_dense(op, {&dy, &x}, args.out[0]);
  sum_columns(args.out[0], args.out.subspan(1), args.stream);
}

}  // namespace

void gelu_erf_backward_summed(const KernelArgs& args) { backward_summed(vec::ScalarOp::kGeluErfBackward, args); }
void gelu_tanh_backward_summed(const KernelArgs& args) { backward_summed(vec::ScalarOp::kGeluTanhBackward, args); }

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
  const bool adds = args.in[0].defined();
  const Tensor in[] = {contiguous(args.in[1], dx.dtype()), args.in[2], args.in[3], args.in[4], args.in[5]};
  Tensor out[] = {adds ? Tensor::empty(dx.sizes(), dx.dtype()) : dx, args.out[2], args.out[3]};
  layer_norm_backward({in, out, args.attrs, args.stream});
  if (adds) add_up(contiguous(args.in[0]), out[0], dx);
  copy_into(dx, args.out[1]);
}

void add_layer_norm_backward_summed(const KernelArgs& args) {
  add_layer_norm_backward({args.in, args.out.first(4), args.attrs, args.stream});
  sum_columns(args.out[1], args.out.subspan(4), args.stream);
}

void attention_backward_joined(const KernelArgs& args) {
  std::array<Tensor, 3> parts = joined_heads(args.out[0]);
  attention_backward({args.in, parts, args.attrs, args.stream});
}

void cross_entropy_with_slopes(const KernelArgs& args) {
  cross_entropy({args.in.subspan(1), args.out.first(2), args.attrs, args.stream});
  Tensor dloss = args.in[0];
  if (!dloss.defined()) {
    dloss = Tensor::empty(args.out[0].sizes(), DType::kF32);
    std::fill_n(dloss.data<float>(), dloss.elems(), 1.0f);
  }
  const Tensor in[] = {dloss, args.in[1], args.in[2], args.in[3], args.out[1]};
  cross_entropy_backward({in, args.out.subspan(2), args.attrs, args.stream});
}

void batch_norm_relu(const KernelArgs& args) {
  const Tensor& y = args.out[0];
  const Tensor in[] = {args.in[0], args.in[2], args.in[3]};
  batch_norm({in, args.out, args.attrs, args.stream});
  if (args.in[1].defined()) add_up(y, lying_like(args.in[1], y), y);
  run_dense(vec::ScalarOp::kRelu, {&y}, y);
}

void batch_norm_relu_backward(const KernelArgs& args) {
  // The ReLU's gradient asks whether its result is zero: where that is so, it was given zero or less.
  const Tensor &x = args.in[1], &dx = args.out[0];
  const Tensor normal = Tensor::empty_strided(dx.sizes(), dx.strides(), dx.dtype());
  standardize_channels({x, args.in[2], args.in[3], args.in[4], args.in[5]}, args.attrs.get<BatchNormAttrs>().eps,
                       normal);
  const Tensor through = lying_like(args.in[0], dx);
  run_dense(vec::ScalarOp::kReluBackward, {&through, &normal}, normal);
  const Tensor in[] = {normal, x, args.in[2], args.in[3], args.in[4]};
  batch_norm_backward({in, args.out, args.attrs, args.stream});
}

void relu_batch_norm_backward(const KernelArgs& args) {
  const Tensor& through = args.out[0];
  Tensor dy = lying_like(args.in[0], through);
  if (args.in[1].defined()) {
    add_up(dy, lying_like(args.in[1], through), through);
    dy = through;
  }
  const Tensor y = lying_like(args.in[2], through);
  run_dense(vec::ScalarOp::kReluBackward, {&dy, &y}, through);
  const Tensor in[] = {through, args.in[3], args.in[4], args.in[5], args.in[6]};
  batch_norm_backward({in, args.out.subspan(1), args.attrs, args.stream});
}

}  // namespace chorale::kernel::cpu
